"""Ensembles that run their steps in processes of their own (`forebay.in_process`)."""

import asyncio
from pathlib import Path

import pytest
from tests.contract.tensor import models
from tests.modelserver.models.rig import IO, alive, config, ensemble, numbers, serving, tensor, until, write

from forebay.core.serving.config import Datatype
from forebay.core.serving.errors import Kind, Refused
from forebay.core.serving.values import InferResponse, Tensor

IN_PROCESS = 'parameters { key: "forebay.in_process" value { string_value: "true" } }\n'
OUTPUTS = ("SUM", "DIFF")
SUMS = """max_batch_size: 8
input [ { name: "A" data_type: TYPE_FP32 dims: [ 4 ] }, { name: "B" data_type: TYPE_FP32 dims: [ 4 ] } ]
output [ { name: "SUM" data_type: TYPE_FP32 dims: [ 4 ] }, { name: "DIFF" data_type: TYPE_FP32 dims: [ 4 ] } ]
"""
TWICE = [
    ("second", {"A": "s", "B": "d"}, {"SUM": "SUM", "DIFF": "DIFF"}),  # in no particular order
    ("sums", {"A": "A", "B": "B"}, {"SUM": "s", "DIFF": "d"}),
]
MIXED = [
    ("sums", {"A": "A", "B": "B"}, {"SUM": "s", "DIFF": "d"}),
    ("double", {"IN": "s"}, {"OUT": "more"}),
    ("second", {"A": "more", "B": "d"}, {"SUM": "SUM", "DIFF": "DIFF"}),
]
BATCHES = config("dynamic_batching {}", dims="4")
DOUBLE = """
    def answer(self, request):
        if get(request)[0, 0] > 100:
            return pb_utils.InferenceResponse(error=pb_utils.TritonError("too much"))
        if get(request)[0, 0] < 0:
            raise ValueError("too little")
        return give(get(request) * 2)
"""


def sums(root: Path, *names: str) -> None:
    """Models of ONNX Runtime: A and B become A + B and A - B."""
    for name in names:
        models.build("onnxruntime", "sums", Datatype.FP32, root / name / "1")
        (root / name / "config.pbtxt").write_text(f'backend: "onnxruntime"\n{SUMS}dynamic_batching {{}}')


def mixed(root: Path) -> None:
    """SUM is 3 A + B, and DIFF is A + 3 B, by three steps of two backends."""
    sums(root, "sums", "second")
    write(root, "double", BATCHES, DOUBLE)
    ensemble(root, "mixed", MIXED, SUMS + IN_PROCESS)


def given(a: float, b: float = 1.0, rows: int = 1) -> tuple[Tensor, Tensor]:
    """The inputs of a request."""
    return tensor("A", [[a] * 4] * rows), tensor("B", [[b] * 4] * rows)


def first(response: InferResponse) -> tuple[float, float]:
    """The first element of both outputs."""
    found = [numbers(response, name)[0][0] for name in OUTPUTS]
    return found[0], found[1]


def test_arrays_of_a_batch_pass_from_step_to_step(tmp_path: Path) -> None:
    sums(tmp_path, "sums", "second")
    ensemble(tmp_path, "twice", TWICE, SUMS + IN_PROCESS)

    async def main() -> None:
        async with serving(tmp_path, startup=("twice",)) as server:
            asked = [
                server.ask("twice", tensor("A", [[n] * 4] * rows), tensor("B", [[1.0] * 4] * rows), outputs=wanted)
                for n, rows, wanted in ((1.0, 1, ()), (2.0, 3, ("SUM",)), (3.0, 2, ("DIFF", "SUM")))
            ]
            first, second, third = [await each.one() for each in asked]
            assert numbers(first, "SUM") == [[2.0] * 4]
            assert numbers(first, "DIFF") == [[2.0] * 4]
            assert numbers(second, "SUM") == [[4.0] * 4] * 3
            assert [each.name for each in second.outputs] == ["SUM"]
            assert numbers(third, "SUM") == [[6.0] * 4] * 2
            (counts,) = server.statistics("twice", "")
            assert (counts.success.count, counts.inference_count, counts.execution_count) == (3, 6, 1)
            for step in ("sums", "second"):
                assert server.statistics(step, "")[0].inference_count == 0
            (pid,) = server.pids("twice")
            assert alive(pid)
            assert Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")[-2] == b"twice:1"
            assert pid not in server.pids("sums") + server.pids("second")
            assert server.view("twice", "").abreast == server.view("sums", "").abreast

    asyncio.run(main())


def test_steps_of_several_backends_answer_as_in_processes_of_their_own(tmp_path: Path) -> None:
    mixed(tmp_path)
    ensemble(tmp_path, "apart", MIXED, SUMS)

    async def main() -> None:
        async with serving(tmp_path, startup=("apart", "mixed")) as server:
            found = {}
            for name in ("apart", "mixed"):
                asked = [
                    server.ask(name, *given(a, 2.0, rows), outputs=wanted)
                    for a, rows, wanted in ((1.0, 2, ()), (99.0, 1, ()), (2.0, 1, ("DIFF",)))
                ]
                found[name] = [await each.one() for each in asked]
            for apart, whole in zip(found["apart"], found["mixed"], strict=True):
                assert {each.name: (each.shape, bytes(each.data)) for each in whole.outputs} == {
                    each.name: (each.shape, bytes(each.data)) for each in apart.outputs
                }
            assert [each.error is None for each in found["mixed"]] == [True, False, True]
            errors = [found[name][1].error for name in ("apart", "mixed")]
            assert [str(each).replace("apart", "mixed") for each in errors] == [str(errors[1])] * 2

    asyncio.run(main())


def test_error_of_one_request_names_its_step_and_spares_the_batch(tmp_path: Path) -> None:
    mixed(tmp_path)

    async def main() -> None:
        async with serving(tmp_path, startup=("mixed",)) as server:
            asked = [server.ask("mixed", *given(a)) for a in (1.0, 100.0, 2.0)]
            good, bad, other = [await each.one() for each in asked]
            assert (first(good), first(other)) == ((4.0, 4.0), (7.0, 5.0))
            assert bad.error is not None
            assert bad.error.text == "in ensemble 'mixed', step of model 'double': too much"
            (counts,) = server.statistics("mixed", "")
            assert (counts.success.count, counts.fail.count, counts.execution_count) == (2, 1, 1)
            refused = await server.ask("mixed", *given(-5.0)).error()
            assert refused.kind is Kind.INTERNAL
            assert refused.text.startswith("in ensemble 'mixed', Failed to process the request(s) for model 'double")
            assert "too little" in refused.text
            assert first(await server.ask("mixed", *given(1.0)).one()) == (4.0, 4.0)

    asyncio.run(main())


def test_steps_that_no_requested_output_needs_do_not_run(tmp_path: Path) -> None:
    mixed(tmp_path)
    output = 'output { name: "d" data_type: TYPE_FP32 dims: [ 4 ] }\n'
    ensemble(tmp_path, "parts", MIXED, SUMS + output + IN_PROCESS)

    async def main() -> None:
        async with serving(tmp_path, startup=("parts",)) as server:
            assert numbers(await server.ask("parts", *given(100.0), outputs=("d",)).one(), "d") == [[99.0] * 4]
            assert "too much" in (await server.ask("parts", *given(100.0)).error()).text

    asyncio.run(main())


def test_steps_that_do_not_batch_answer_one_request_after_the_other(tmp_path: Path) -> None:
    write(tmp_path, "double", config(max_batch=0, dims="-1, -1"), DOUBLE)
    steps = [("double", {"IN": "IN"}, {"OUT": "OUT"})]
    ensemble(tmp_path, "alone", steps, IO.format(dims="-1, -1") + IN_PROCESS)

    async def main() -> None:
        async with serving(tmp_path, startup=("alone",)) as server:
            asked = [server.ask("alone", tensor("IN", [[n] * 3])) for n in (1.0, 2.0)]
            assert [numbers(await each.one()) for each in asked] == [[[2.0] * 3], [[4.0] * 3]]
            assert server.statistics("alone", "")[0].execution_count == 2

    asyncio.run(main())


def test_ensemble_in_one_process_sleeps_and_wakes_with_its_steps(tmp_path: Path) -> None:
    mixed(tmp_path)

    async def main() -> None:
        async with serving(tmp_path, startup=("mixed",), memory_bytes=1 << 40) as server:
            version = server.itself._collection.find("mixed", -1)
            for name in ("mixed", "double"):
                await server.itself._collection.find(name, -1).sleep()
            assert version.dormant
            assert first(await server.ask("mixed", *given(1.0)).one()) == (4.0, 4.0)
            assert not version.dormant

    asyncio.run(main())


def test_ensemble_follows_its_steps(tmp_path: Path) -> None:
    mixed(tmp_path)

    async def main() -> None:
        async with serving(tmp_path, startup=("mixed",)) as server:
            assert first(await server.ask("mixed", *given(1.0)).one()) == (4.0, 4.0)
            write(tmp_path, "double", BATCHES, DOUBLE.replace("* 2", "* 3"))
            await server.load("double", {})
            assert first(await server.ask("mixed", *given(1.0)).one()) == (6.0, 6.0)
            pids = server.pids("mixed")
            await server.unload("double", False)
            with pytest.raises(Refused, match="no available versions"):
                server.ask("mixed", *given(1.0))
            await until("its processes end", lambda: not any(map(alive, pids)))
            await server.load("double", {})
            assert first(await server.ask("mixed", *given(1.0)).one()) == (6.0, 6.0)

    asyncio.run(main())


def test_measures_of_a_python_step_are_those_of_the_ensemble(tmp_path: Path) -> None:
    mixed(tmp_path)
    counting = """
    def initialize(self, args):
        family = pb_utils.MetricFamily("asked", "requests", pb_utils.MetricFamily.COUNTER)
        self.asked = family.Metric(labels={"by": args["model_name"]})

    def answer(self, request):
        self.asked.increment(1)
        return give(get(request) * 2)
"""
    write(tmp_path, "double", BATCHES, counting)

    async def main() -> None:
        async with serving(tmp_path, startup=("mixed",)) as server:
            assert first(await server.ask("mixed", *given(1.0)).one()) == (4.0, 4.0)
            (family,) = [each for each in await server.measure() if each.name == "asked"]
            assert [(dict(each.labels)["by"], each.value) for each in family.series] == [("double", 1.0)]

    asyncio.run(main())


def test_steps_that_cannot_share_a_process_are_errors_of_the_load(tmp_path: Path) -> None:
    mixed(tmp_path)
    write(tmp_path, "double", config("model_transaction_policy { decoupled: true }", dims="4"), DOUBLE)

    async def main() -> None:
        async with serving(tmp_path, startup=()) as server:
            with pytest.raises(Refused) as refused:
                await server.load("mixed", {})
            reason = "ensemble 'mixed' has forebay.in_process, but model 'double' of its steps is decoupled"
            assert reason in refused.value.text
            write(tmp_path, "double", config(IN_PROCESS, dims="4"), DOUBLE)
            with pytest.raises(Refused, match="only ensembles have steps to run in one process"):
                await server.load("double", {})

    asyncio.run(main())
