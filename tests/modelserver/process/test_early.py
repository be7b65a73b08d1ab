"""Requests that are answered while their batch runs."""

import asyncio
import os
import signal
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.modelserver.models.rig import IO, ensemble, serving, tensor, write
from tests.modelserver.models.rig import config as configured
from tests.modelserver.models.rig import numbers as numbers_of
from tests.modelserver.process.rig import Heard, spec, started, until, values, work

from forebay.core.serving.config import Step
from forebay.core.serving.errors import Kind
from forebay.core.serving.values import Tensor
from forebay.engines.tensor.batch import MicroBatches, early_ns, execute
from forebay.engines.tensor.protocol import Array, Emit, Request, Response, Stack
from forebay.modelserver.process.child.steps import Steps, _Step
from forebay.modelserver.process.process import ModelProcess

IN_PROCESS = 'parameters { key: "forebay.in_process" value { string_value: "true" } }\n'
ONE_ROW = 'parameters { key: "forebay.micro_batch_rows" value { string_value: "1" } }\n'
ONE_CORE = 'parameters { key: "intra_op_thread_count" value { string_value: "1" } }\n'
TOGETHER = "dynamic_batching { preferred_batch_size: 4 max_queue_delay_microseconds: 5000000 }\n"
EDGE = 2048
"""Of the matrices that `slow` multiplies: 17 GFLOP for each run, more than `early_ns` on a core of any kind."""
ODD = """
    def execute(self, requests):
        if get(requests[0])[0, 0] == {failing}:
            raise ValueError("not this one")
        return [give(get(request) + 1) for request in requests]
"""


async def batch(process: ModelProcess, then: str = "") -> Heard:
    """A batch of five of which three are answered."""
    heard = Heard()
    works = [work("in parts", np.full((rows, 1), rows, np.float32), then=then) for rows in (1, 2, 3, 4, 5)]
    number = process.execute(0, works, heard)
    await until(lambda: len(heard.responses) == 3)
    assert heard.done is None
    for index in (0, 3):  # one that has ended, and one that has not
        process.cancel(number, index)
    return heard


def errors(heard: Heard) -> list[str]:
    """Of the answers so far; empty: none."""
    return [str(answer.error or "") for _, answer, _ in heard.responses if answer is not None]


def test_answers_come_before_the_end_of_the_batch(tmp_path: Path) -> None:
    async def scene() -> None:
        async with started(spec(tmp_path)) as process:
            heard = await batch(process)
            (tmp_path / "go").touch()
            await until(lambda: heard.done)
            assert [(index, final) for index, _, final in heard.responses] == [(0, True), (1, True), (2, True)]
            assert [values(answer) for _, answer, _ in heard.responses[:2] if answer is not None] == [[1], [2, 2]]
            assert errors(heard) == ["", "", "not this one"]
            assert heard.done is not None
            assert heard.done.answers[:3] == (None, None, None)
            assert [values(each) for each in heard.done.answers[3:] if each is not None] == [[4] * 4, [5] * 5]
            assert process.outstanding(0) == 0

    asyncio.run(scene())


def test_a_streamed_response_may_follow(tmp_path: Path) -> None:
    async def scene() -> None:
        async with started(spec(tmp_path)) as process:
            heard = await batch(process, "stream")
            (tmp_path / "go").touch()
            await until(lambda: heard.done)
            assert [index for index, _, _ in heard.responses] == [0, 1, 2, 4]
            assert heard.done is not None
            assert [answer is None for answer in heard.done.answers] == [True, True, True, False, True]

    asyncio.run(scene())


@pytest.mark.parametrize(
    ("then", "text"), [("fail", "the rest cannot"), ("lose", "the model gave 0 responses to 2 requests")]
)
def test_the_rest_fails_alone(tmp_path: Path, then: str, text: str) -> None:
    async def scene() -> None:
        async with started(spec(tmp_path)) as process:
            heard = await batch(process, then)
            (tmp_path / "go").touch()
            await until(lambda: heard.done)
            assert heard.done is not None
            assert heard.done.failure is not None
            assert (heard.done.failure.kind, heard.done.failure.text) == (Kind.INTERNAL, text)
            assert errors(heard) == ["", "", "not this one"]
            assert values(heard.responses[1][1] or pytest.fail("no answer")) == [2, 2]

    asyncio.run(scene())


def test_a_process_that_is_killed_takes_only_the_rest_with_it(tmp_path: Path) -> None:
    async def scene() -> None:
        async with started(spec(tmp_path)) as process:
            heard = await batch(process)
            os.kill(process.pids[0], signal.SIGKILL)
            await until(lambda: heard.done)
            assert heard.done is not None
            assert heard.done.failure is not None
            assert heard.done.failure.kind is Kind.UNAVAILABLE
            assert len(heard.responses) == 3

    asyncio.run(scene())


def slow(root: Path, name: str) -> None:
    """An ONNX model that returns its input, in a tenth of a second and more for each, a row at a time."""
    onnx = pytest.importorskip("onnx")
    helper, numpy_helper, types = onnx.helper, onnx.numpy_helper, onnx.TensorProto
    node, ends = (
        helper.make_node,
        [helper.make_tensor_value_info(each, types.FLOAT, ["n", 1]) for each in ("IN", "OUT")],
    )
    nodes = [
        node("ReduceMin", ["IN"], ["least"], keepdims=0),
        node("Mul", ["zeros", "least"], ["scaled"]),  # only known when it runs
        node("MatMul", ["scaled", "zeros"], ["product"]),
        node("ReduceMax", ["product"], ["nothing"], keepdims=0),
        node("Add", ["IN", "nothing"], ["OUT"]),
    ]
    zeros = numpy_helper.from_array(np.zeros((EDGE, EDGE), np.float32), "zeros")
    graph = helper.make_graph(nodes, "g", ends[:1], ends[1:], [zeros])
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=9)
    (root / name / "1").mkdir(parents=True)
    onnx.save(model, str(root / name / "1/model.onnx"))
    text = configured(TOGETHER + ONE_ROW + ONE_CORE, dims="1", max_batch=4, backend="onnxruntime")
    (root / name / "config.pbtxt").write_text(text)


def given(value: float) -> Tensor:
    """The input of a request."""
    return tensor("IN", [[value]])


def counted(server: Any, name: str) -> tuple[int, int, int]:
    """Successes, failures and executions."""
    (counts,) = server.statistics(name, "")
    return counts.success.count, counts.fail.count, counts.execution_count


def test_server_answers_requests_as_soon_as_their_rows_have_run(tmp_path: Path) -> None:
    slow(tmp_path, "slow")

    async def main() -> None:
        async with serving(tmp_path, startup=("slow",)) as server:
            for _ in range(2):  # the first batch runs as a whole
                before = counted(server, "slow")
                asked = [server.ask("slow", given(value)) for value in (1.0, 2.0, 3.0, 4.0)]
                assert numbers_of(await asked[0].one()) == [[1.0]]
                seen = counted(server, "slow")
                assert [numbers_of(await each.one()) for each in asked[1:]] == [[[2.0]], [[3.0]], [[4.0]]]
            (counts,) = server.statistics("slow", "")
            assert (before, seen[1:]) == ((4, 0, 1), (0, 1))
            assert seen[0] in (5, 6, 7)
            assert counted(server, "slow") == (8, 0, 2)
            assert counts.inference_count == 8
            assert counts.batches[4].compute_infer.ns > counts.compute_infer.ns / 4  # a request's is up to its answer

    asyncio.run(main())


def test_requests_of_a_killed_model_process_end_once(tmp_path: Path) -> None:
    slow(tmp_path, "slow")

    async def main() -> None:
        async with serving(tmp_path, startup=("slow",)) as server:
            for _ in range(2):
                asked = [server.ask("slow", given(value)) for value in (1.0, 2.0, 3.0, 4.0)]
                await asked[0].all()
            os.kill(server.pids("slow")[0], signal.SIGKILL)
            found = [(await each.all())[0] for each in asked]
            failed = [each.error.kind for each in found if each.error is not None]
            assert set(failed) == {Kind.UNAVAILABLE}
            assert [each.error is None for each in found] == [True] * (4 - len(failed)) + [False] * len(failed)
            assert counted(server, "slow") == (8 - len(failed), len(failed), 1)
            again = [server.ask("slow", given(5.0)) for _ in range(4)]
            assert [numbers_of(await each.one()) for each in again] == [[[5.0]]] * 4

    asyncio.run(main())


@pytest.mark.parametrize(
    ("steps", "failing"),
    [(("slow", "more"), 0), (("slow", "more"), 1), (("slow", "more", "slow"), 4), (("more", "slow", "more"), 0)],
    ids=["none fails", "the first fails", "the last fails", "the slow one is between others"],
)
def test_ensemble_in_one_process_takes_parts_of_a_batch_through_all_steps(
    tmp_path: Path, steps: tuple[str, ...], failing: int
) -> None:
    slow(tmp_path, "slow")
    write(tmp_path, "more", configured(TOGETHER, dims="1", max_batch=4), ODD.format(failing=failing or -1))
    names = ["IN", *(f"t{number}" for number in range(1, len(steps))), "OUT"]
    maps = [(step, {"IN": names[number]}, {"OUT": names[number + 1]}) for number, step in enumerate(steps)]
    batching = "max_batch_size: 4\n" + IO.format(dims="1") + IN_PROCESS
    ensemble(tmp_path, "whole", maps, batching)

    async def main() -> None:
        async with serving(tmp_path, startup=("whole",)) as server:
            seen = []
            for _ in range(2):
                asked = [server.ask("whole", given(value)) for value in (1.0, 2.0, 3.0, 4.0)]
                await asked[0].all()
                seen.append(counted(server, "whole"))
                found = [(await each.all())[0] for each in asked]
            for value, response in enumerate(found, 1):
                if response.error is None:
                    assert numbers_of(response) == [[value + steps.count("more")]]
                else:
                    assert response.error.text.startswith("in ensemble 'whole', ")
            assert counted(server, "whole")[2] == 2
            if not failing:
                assert all(each.error is None for each in found)
            if steps[0] == "slow":
                assert seen[1][2] == 1  # the first request had its answer before the end
                assert [each.error is None for each in found] == [value != failing for value in (1, 2, 3, 4)]

    asyncio.run(main())


class Slow:
    """A step that answers early, so many requests at once."""

    def __init__(self, at_once: int) -> None:
        self._micro = MicroBatches(at_once, lambda: self._now_ns)
        self._now_ns = 0

    def execute(self, instance: int, requests: Sequence[Request], emit: Emit) -> Sequence[Response]:
        return execute(requests, ("OUT",), self._run, micro=self._micro, emit=emit)

    def _run(self, feed: dict[str, Array], wanted: Sequence[str]) -> dict[str, Array]:
        self._now_ns += early_ns()
        return {"OUT": feed["IN"]}


class Raising:
    """A step that fails with everything that it is given together with a 3."""

    def execute(self, instance: int, requests: Sequence[Request], emit: Emit) -> Sequence[Response]:
        found = [Response({"OUT": request.inputs["IN"]}) for request in requests]
        if any(3.0 in each.outputs["OUT"] for each in found):
            raise TypeError("no 3")
        return found


@pytest.mark.interpreted
def test_a_part_of_which_some_requests_are_answered_fails_without_these(tmp_path: Path) -> None:
    backends: list[Any] = [Slow(4), Slow(1), Raising()]
    ends = ("IN", "x", "y", "OUT")
    maps = [Step(f"m{at}", -1, {"IN": ends[at]}, {"OUT": ends[at + 1]}) for at in range(3)]
    steps = Steps([])
    steps._outputs = ("OUT",)
    steps._steps = [_Step("e", step, backend) for step, backend in zip(maps, backends, strict=True)]
    told: list[tuple[int, list[object]]] = []

    def emit(index: int, response: Response | Sequence[Response] | None, final: bool) -> None:
        assert isinstance(response, Sequence)
        told.append((index, [each.error or each.outputs["OUT"].item() for each in response]))

    def batch(start: float) -> Sequence[Response | None]:
        told.clear()
        inputs = {"IN": np.arange(start, start + 8).reshape(-1, 1)}
        return steps.execute(0, Stack(inputs, [1] * 8, [()] * 8, lambda _, its: Request("", its, ())), emit)

    batch(100.0)
    left = batch(0.0)

    failure = "in ensemble 'e', step of model 'm2': no 3"
    assert told == [(0, [0.0]), (1, [1.0]), (2, [2.0]), (3, [failure]), (4, [4.0]), (5, [5.0]), (6, [6.0])]
    assert [each.outputs["OUT"].item() for each in left if each is not None] == [7.0]
