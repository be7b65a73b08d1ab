"""Batches that run in parts, as large as is fastest."""

import itertools
from collections.abc import Callable, Sequence

import numpy as np
import pytest

from forebay.core.serving.config import DynamicBatching, ModelConfig
from forebay.engines.tensor.batch import PRUNED_AFTER, REST, REST_MOST, RUNS, SHORT_NS, SMALLER_MOST, MicroBatches
from forebay.engines.tensor.protocol import Array, Request
from forebay.engines.tensor.ragged import Ragged

RUN_NS = 2 * SHORT_NS


class Model:
    """Doubles its input; its time passes on a clock of its own, by a cost for a run and one for a row."""

    def __init__(self, row_ns: Callable[[int], int] = lambda rows: RUN_NS, run_ns: int = RUN_NS) -> None:
        self.row_ns = row_ns
        self._run_ns = run_ns
        self.now_ns = 0
        self.runs: list[int] = []

    def __call__(self, feed: dict[str, Array], wanted: Sequence[str]) -> dict[str, Array]:
        x = feed["X"]
        self.runs.append(len(x) if x.ndim else 0)
        self.now_ns += self._run_ns + self.row_ns(self.runs[-1]) * self.runs[-1]
        if (x < 0).any():
            raise ValueError("negative")
        return {"Y": x * 2}

    def clock_ns(self) -> int:
        return self.now_ns


def crowded(fitting: int) -> Callable[[int], int]:
    """Longer for each row the more rows there are than fit into a cache."""
    return lambda rows: RUN_NS * (10 + max(0, (rows // fitting).bit_length() - 1))


def batches(micro: MicroBatches, model: Model, count: int, *, rows: int = 32, width: int = 8) -> list[int]:
    """Run batches; returns the rows of the runs of the last one, and holds that its outputs are right."""
    x = np.arange(rows * width, dtype=np.float32).reshape(rows, width)
    for _ in range(count):
        model.runs.clear()
        made = micro.run(model, {"X": x}, ["Y"])
        assert np.array_equal(made["Y"], x * 2)
    return model.runs


@pytest.mark.parametrize(("fitting", "found"), [(1, 1), (4, 4), (16, 16), (32, 32)])
def test_the_size_that_is_fastest_is_found(fitting: int, found: int) -> None:
    model = Model(crowded(fitting))
    micro = MicroBatches(clock_ns=model.clock_ns)

    assert batches(micro, model, 1 + 2 * RUNS * 6) == [found] * (32 // found)
    assert micro.chosen() == {64: found}


def test_a_gain_is_found_behind_sizes_without_one() -> None:
    model = Model(lambda rows: RUN_NS * (10 if rows <= 4 else 20))
    micro = MicroBatches(clock_ns=model.clock_ns)

    assert batches(micro, model, 1 + 2 * RUNS * 6) == [4] * 8


def test_a_comparison_takes_few_batches_and_then_rests() -> None:
    model = Model()
    micro = MicroBatches(clock_ns=model.clock_ns)
    batches(micro, model, 1 + 6 * RUNS)

    cut = [len(batches(micro, model, 1)) > 1 for _ in range(8 * REST_MOST)]
    whole = [len(list(group)) for is_cut, group in itertools.groupby(cut) if not is_cut]
    assert [round(count / REST) for count in whole if count > REST // 2][:5] == [1, 2, 4, 4, 4]


def test_what_becomes_slower_is_found_again() -> None:
    model = Model(crowded(4))
    micro = MicroBatches(clock_ns=model.clock_ns)
    batches(micro, model, 1 + 2 * RUNS * 6)

    model.row_ns = crowded(1)
    assert batches(micro, model, 3 * (REST_MOST + 6 * RUNS)) == [1] * 32
    model.row_ns = crowded(16)
    assert batches(micro, model, 5 * (REST_MOST + 6 * RUNS)) == [16] * 2


def test_what_large_batches_have_shown_holds_for_smaller_ones() -> None:
    model = Model(crowded(4))
    micro = MicroBatches(clock_ns=model.clock_ns)
    batches(micro, model, 1 + 6 * RUNS)

    assert {tuple(batches(micro, model, 1, rows=11)) for _ in range(2 * REST_MOST)} == {(3, 4, 4)}
    assert {tuple(batches(micro, model, 1, rows=2)) for _ in range(2 * REST_MOST)} == {(2,)}


def test_larger_batches_than_before_are_compared_anew() -> None:
    model = Model(crowded(32))
    micro = MicroBatches(clock_ns=model.clock_ns)
    batches(micro, model, 1 + 4 * RUNS, rows=4)

    assert {len(batches(micro, model, 1, rows=4)) for _ in range(REST // 2)} == {1}
    assert len({len(batches(micro, model, 1)) for _ in range(6 * RUNS)}) == 6
    assert batches(micro, model, 1) == [32]


def test_a_large_batch_that_stays_alone_does_not_end_comparisons() -> None:
    model = Model(crowded(2))
    micro = MicroBatches(clock_ns=model.clock_ns)
    batches(micro, model, 3)

    assert batches(micro, model, SMALLER_MOST, rows=8) == [8]
    assert batches(micro, model, 1 + 4 * RUNS, rows=8) == [2] * 4


def test_rows_of_other_sizes_are_another_matter() -> None:
    model = Model(crowded(4))
    micro = MicroBatches(clock_ns=model.clock_ns)
    batches(micro, model, 1 + 6 * RUNS)
    model.row_ns = crowded(32)

    assert batches(micro, model, 1 + 6 * RUNS, width=64) == [32]
    assert batches(micro, model, 1) == [4] * 8
    assert micro.chosen() == {64: 4, 512: 32}


def test_sizes_that_take_far_longer_are_not_tried_often() -> None:
    model = Model(lambda rows: RUN_NS, run_ns=100 * RUN_NS)
    micro = MicroBatches(clock_ns=model.clock_ns)

    tried = [len(batches(micro, model, 1)) for _ in range(1 + 12 * RUNS)]

    assert max(tried.count(runs) for runs in (2, 4, 8, 16, 32)) == PRUNED_AFTER


def test_short_batches_stay_whole() -> None:
    model = Model(lambda rows: 10 * rows, run_ns=0)
    micro = MicroBatches(clock_ns=model.clock_ns)

    assert {len(batches(micro, model, 1)) for _ in range(2 * REST_MOST)} == {1}


@pytest.mark.parametrize(("rows", "runs"), [(0, [32]), (1, [1] * 32), (12, [10, 11, 11]), (32, [32]), (99, [32])])
def test_the_size_can_be_set(rows: int, runs: list[int]) -> None:
    model = Model(crowded(4))
    micro = MicroBatches(rows, model.clock_ns)

    assert batches(micro, model, 1) == [32]
    assert batches(micro, model, 4 * RUNS) == runs


@pytest.mark.parametrize(
    "odd",
    [
        lambda x: np.float32(len(x)),
        lambda x: x[:1],
        lambda x: np.ones((len(x), len(x)), np.float32),
        lambda x: x.astype(np.float64 if x[0, 0] else np.float32),
    ],
)
def test_outputs_that_cannot_be_put_together_keep_batches_whole(odd: Callable[[Array], Array]) -> None:
    seen: list[int] = []

    def model(feed: dict[str, Array], wanted: Sequence[str]) -> dict[str, Array]:
        seen.append(len(feed["X"]))
        return {"Y": np.asarray(odd(feed["X"]))}

    micro = MicroBatches(3)
    x = np.arange(32, dtype=np.float32).reshape(8, 4)
    made = [micro.run(model, {"X": x}, ["Y"])["Y"] for _ in range(4)]

    assert all(np.array_equal(each, odd(x)) for each in made)
    assert seen.count(8) == 4
    assert seen[-2:] == [8, 8]


@pytest.mark.parametrize("buffers", [1, 2, 3])
@pytest.mark.parametrize("rows", [8, 11])
def test_a_model_that_answers_in_memory_of_its_own_overwrites_nothing(rows: int, buffers: int) -> None:
    """In a few buffers in turn, for each number of rows; of 11 rows, the first part is smaller than the others."""
    memory = {size: itertools.cycle([np.zeros((size, 1)) for _ in range(buffers)]) for size in range(rows + 1)}

    def model(feed: dict[str, Array], wanted: Sequence[str]) -> dict[str, Array]:
        made = next(memory[len(feed["X"])])
        made[:] = feed["X"] * 2
        return {"Y": made[:]}

    micro = MicroBatches(2)
    x = np.arange(float(rows)).reshape(rows, 1)

    assert all(np.array_equal(micro.run(model, {"X": x}, ["Y"])["Y"], x * 2) for _ in range(3))


def test_a_model_that_takes_only_whole_batches_gets_them() -> None:
    seen: list[int] = []

    def model(feed: dict[str, Array], wanted: Sequence[str]) -> dict[str, Array]:
        seen.append(len(feed["X"]))
        if seen[-1] != 8:
            raise RuntimeError("Got invalid dimensions, expected 8")
        return {"Y": feed["X"]}

    micro = MicroBatches(4)
    for _ in range(3):
        micro.run(model, {"X": np.ones((8, 1))}, ["Y"])

    assert seen == [8, 4, 8, 8]
    assert micro.chosen() == {}


def test_the_error_of_a_bad_row_is_that_of_the_whole_batch_and_changes_nothing() -> None:
    model = Model()
    micro = MicroBatches(2)
    batches(micro, model, 1, rows=4)

    with pytest.raises(ValueError, match="negative"):
        micro.run(model, {"X": np.array([[1.0], [-1.0], [1.0], [1.0]])}, ["Y"])
    assert batches(micro, model, 1, rows=4) == [2, 2]


def test_inputs_without_rows_in_common_run_as_they_are() -> None:
    micro = MicroBatches(1)

    def model(feed: dict[str, Array], wanted: Sequence[str]) -> dict[str, Array]:
        return {"Y": np.array([len(each) if each.ndim else 0 for each in feed.values()])}

    for inputs in ({"A": np.ones(4), "B": np.ones(3)}, {"A": np.float32(1)}, {"A": np.ones(4), "B": np.float32(1)}):
        for _ in range(2):
            given = {name: np.asarray(each) for name, each in inputs.items()}
            assert micro.run(model, given, ["Y"])["Y"].tolist() == [
                each.size if each.ndim else 0 for each in given.values()
            ]
    assert micro.run(model, {}, ["Y"])["Y"].size == 0


def test_only_models_with_independent_rows_on_a_cpu_run_in_parts() -> None:
    def runs(config: ModelConfig, *, cpu: bool = True) -> int:
        ragged, model = Ragged(config, cpu=cpu), Model()
        for _ in range(2):
            model.runs.clear()
            ragged.execute([Request("", {"X": np.ones((4, 1), np.float32)}, ())], ["Y"], model)
        return len(model.runs)

    parameters = {"forebay.micro_batch_rows": "2"}
    batching = DynamicBatching()

    assert runs(ModelConfig("m", "b", max_batch=8, batching=batching, parameters=parameters)) == 2
    assert runs(ModelConfig("m", "b", max_batch=8, batching=batching, parameters=parameters), cpu=False) == 1
    assert runs(ModelConfig("m", "b", max_batch=8, parameters=parameters)) == 1
    assert runs(ModelConfig("m", "b", max_batch=8, batching=batching)) == 1
