"""Requests of a batch that are answered before it ends."""

from collections.abc import Sequence

import numpy as np
import pytest

from forebay.engines.tensor.batch import PRUNED_AFTER, REST, RUNS, MicroBatches, early_ns, execute
from forebay.engines.tensor.protocol import Array, Request, Response, Rows, Stack

OUTPUTS = ("Y", "Z")
EARLY_NS = early_ns()


class Model:
    """Doubles and negates its input, in so much time for each row, or twice as much for more than fit."""

    def __init__(self, row_ns: int = EARLY_NS, *, reuses: bool = False, fitting: int = 99) -> None:
        self.now_ns = 0
        self.runs: list[int] = []
        self.bad: float | None = None
        self._row_ns = row_ns
        self._fitting = fitting
        self._memory = np.zeros((64, 1)) if reuses else None

    def __call__(self, feed: dict[str, Array], wanted: Sequence[str]) -> dict[str, Array]:
        x = feed["X"]
        self.runs.append(len(x))
        self.now_ns += self._row_ns * len(x) * (1 if len(x) <= self._fitting else 2)
        if self.bad in x:
            raise ValueError("bad row")
        made = {"Y": x * 2, "Z": -x}
        if self._memory is not None:
            self._memory[: len(x)] = made["Y"]
            made["Y"] = self._memory[: len(x)]
        return {name: made[name] for name in wanted}

    def clock_ns(self) -> int:
        return self.now_ns


class Told:
    """What was emitted, as copies: like packets."""

    def __init__(self) -> None:
        self.answers: list[dict[str, list[float]]] = []
        self.parts: list[int] = []

    def __call__(self, index: int, response: Response | Sequence[Response] | None, final: bool) -> None:
        assert isinstance(response, Rows)
        assert final
        assert index == len(self.answers)
        self.parts.append(len(response))
        self.answers += map(listed, response)


def listed(response: Response) -> dict[str, list[float]]:
    """Its outputs; an error as such."""
    if response.error:
        return {response.error: []}
    return {name: array.ravel().tolist() for name, array in response.outputs.items()}


def stack(sizes: Sequence[int], wanted: Sequence[tuple[str, ...]] | None = None) -> Stack:
    """Requests with so many rows; these are numbered."""
    inputs = {"X": np.arange(float(sum(sizes))).reshape(-1, 1)}
    asked = wanted or [()] * len(sizes)
    return Stack(inputs, list(sizes), asked, lambda place, its: Request("", its, asked[place]))


def run(model: Model, requests: Sequence[Request], micro: MicroBatches) -> tuple[Told, list[dict[str, list[float]]]]:
    """Run a batch, after another one; what was answered early, and all answers."""
    micro.run(model, {"X": np.zeros((2, 1))}, OUTPUTS)
    model.runs.clear()
    told = Told()
    left = execute(requests, OUTPUTS, model, micro=micro, emit=told)
    return told, told.answers + [listed(each) for each in left]


def right(sizes: Sequence[int], wanted: Sequence[tuple[str, ...]] | None = None) -> list[dict[str, list[float]]]:
    """The answers that are right."""
    found = execute(stack(sizes, wanted), OUTPUTS, Model())
    return [listed(each) for each in found]


@pytest.mark.parametrize("reuses", [False, True], ids=["new memory", "its own memory"])
@pytest.mark.parametrize(
    ("sizes", "at_once", "parts"),
    [
        ((1, 1, 1, 1), 1, [1, 1, 1]),
        ((2, 2, 2), 2, [1, 1]),
        ((1, 4, 1, 1), 1, [1, 1, 1]),
        ((4, 1, 3), 3, [2]),
        ((0, 1, 0, 2, 0), 1, [3]),
        ((6,), 2, []),
        ((1, 5), 3, [1]),
    ],
)
def test_requests_are_answered_when_their_rows_have_run(
    sizes: Sequence[int], at_once: int, parts: list[int], reuses: bool
) -> None:
    model = Model(reuses=reuses)
    told, answers = run(model, stack(sizes), MicroBatches(at_once, model.clock_ns))

    assert reuses or told.parts == parts  # parts that are to be put together must not lie in the same memory
    assert answers == right(sizes)


def test_requests_in_arrays_of_their_own_are_answered_as_early() -> None:
    model = Model()
    told, answers = run(model, list(stack((1, 2, 1))), MicroBatches(1, model.clock_ns))

    assert told.parts == [1, 1]
    assert answers == right((1, 2, 1))


def test_answers_wait_for_others_if_rows_take_little_time() -> None:
    model = Model(EARLY_NS // 3)
    told, answers = run(model, stack((1,) * 8), MicroBatches(1, model.clock_ns))

    assert told.parts == [4]
    assert answers == right((1,) * 8)


def test_nothing_is_answered_early_if_requests_want_or_have_different_things() -> None:
    model = Model()
    wanted: list[tuple[str, ...]] = [(), ("Z",), ("Y",)]
    told, answers = run(model, stack((1, 2, 1), wanted), MicroBatches(1, model.clock_ns))
    assert (told.parts, answers) == ([], right((1, 2, 1), wanted))

    mixed = [Request("", {"X": np.ones((2, width))}, ("Y",)) for width in (1, 3, 1)]
    told, answers = run(model, mixed, MicroBatches(1, model.clock_ns))
    assert told.parts == []
    assert answers == [{"Y": [2.0] * 2 * width} for width in (1, 3, 1)]


def test_comparisons_are_not_disturbed() -> None:
    model = Model(fitting=2)
    micro = MicroBatches(clock_ns=model.clock_ns)
    found = [run(model, stack((1,) * 8), micro)[0].parts for _ in range(4 * RUNS + REST // 2)]

    compared = found.index([2, 2, 2])
    assert compared > 4 * PRUNED_AFTER
    assert found == [[]] * compared + [[2, 2, 2]] * (len(found) - compared)


def test_good_requests_of_a_failed_batch_keep_their_answers_if_the_model_uses_its_memory_again() -> None:
    model = Model(reuses=True)
    model.bad = 3.0

    found = [listed(each) for each in execute(stack((1,) * 5), ("Y",), model)]

    assert found == [{"Y": [0.0]}, {"Y": [2.0]}, {"Y": [4.0]}, {"bad row": []}, {"Y": [8.0]}]


def test_requests_with_different_shapes_keep_their_answers_if_the_model_uses_its_memory_again() -> None:
    memory = np.zeros(8)

    def model(feed: dict[str, Array], wanted: Sequence[str]) -> dict[str, Array]:
        made = memory[: feed["X"].size].reshape(feed["X"].shape)
        made[:] = feed["X"] * 2
        return {"Y": made}

    requests = [Request("", {"X": np.full((1, width), float(width))}, ()) for width in (1, 2, 1, 3)]

    assert [listed(each)["Y"] for each in execute(requests, ("Y",), model)] == [[2.0], [4.0] * 2, [2.0], [6.0] * 3]


def test_only_requests_that_are_not_answered_run_again_when_a_later_part_fails() -> None:
    model = Model()
    model.bad = 3.0
    told, answers = run(model, stack((1,) * 5), MicroBatches(1, model.clock_ns))

    assert told.parts == [1, 1, 1]
    assert answers[:3] + answers[4:] == right((1,) * 3) + right((1,) * 5)[4:]
    assert answers[3] == {"bad row": []}
    assert model.runs == [1, 1, 1, 1, 2, 1, 1]  # the failed part, the rest as a whole, then each


def test_no_answer_is_lost_when_parts_do_not_fit() -> None:
    model = Model()

    def odd(feed: dict[str, Array], wanted: Sequence[str]) -> dict[str, Array]:
        made = model(feed, wanted)
        return {name: np.tile(array, (1, 2)) if feed["X"][0] >= 2 else array for name, array in made.items()}

    micro = MicroBatches(2, model.clock_ns)
    micro.run(model, {"X": np.zeros((2, 1))}, OUTPUTS)
    told = Told()
    left = execute(stack((2, 2, 2)), OUTPUTS, odd, micro=micro, emit=told)

    assert told.answers == right((2,))
    assert [np.shape(each.outputs["Y"]) for each in left] == [(2, 2), (2, 2)]
