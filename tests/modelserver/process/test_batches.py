"""Batches between the server and a model's child process."""

import asyncio
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.modelserver.process.rig import HERE, Heard, answers, run, spec, started, until, values, work

from forebay.core.serving.config import Datatype
from forebay.core.serving.errors import Kind, Refused
from forebay.core.serving.values import Tensor
from forebay.modelserver.process import supervisor
from forebay.modelserver.process.messages import Ping
from forebay.modelserver.process.placement import Placement
from forebay.modelserver.process.process import ModelProcess
from forebay.modelserver.process.values import Answer, Call, Work


def test_batch_responses_match_their_requests_in_order(tmp_path: Path) -> None:
    async def scene() -> None:
        async with started(spec(tmp_path)) as process:
            got = await answers(process, work(data=[1, 2]), work(data=[3]), work(data=[]), work(data=[[4], [5]]))
            assert [values(answer) for answer in got] == [[1, 2], [3], [], [4, 5]]
            assert [answer.outputs[0].shape for answer in got] == [(2,), (1,), (0,), (2, 1)]

    asyncio.run(scene())


TENSORS = {
    "bool": (Datatype.BOOL, (3,), b"\1\0\1"),
    "u1": (Datatype.UINT8, (2,), b"\xff\1"),
    "u2": (Datatype.UINT16, (1,), b"\1\xff"),
    "u4": (Datatype.UINT32, (1,), b"\1\2\3\4"),
    "u8": (Datatype.UINT64, (1,), b"\1\2\3\4\5\6\7\xff"),
    "i1": (Datatype.INT8, (1,), b"\xff"),
    "i2": (Datatype.INT16, (1,), b"\xff\1"),
    "i4": (Datatype.INT32, (1, 1), b"\1\2\3\xff"),
    "i8": (Datatype.INT64, (), b"\1\2\3\4\5\6\7\x08"),
    "f2": (Datatype.FP16, (2,), b"\0\x3c\0\x40"),
    "f4": (Datatype.FP32, (1,), b"\0\0\x80\x3f"),
    "f8": (Datatype.FP64, (1,), b"\0\0\0\0\0\0\xf0\x3f"),
    "bf": (Datatype.BF16, (1,), b"\x80\x3f"),
    "bytes": (Datatype.BYTES, (2, 2), b"\2\0\0\0ab\0\0\0\0\1\0\0\0\0\3\0\0\0\xff\xfe\xfd"),
    "none": (Datatype.BYTES, (0,), b""),
}


@pytest.mark.parametrize("filler", [0, 200_000], ids=["within the packet", "in a segment"])
def test_every_datatype_reaches_the_child_unchanged(tmp_path: Path, filler: int) -> None:
    inputs = [Tensor(name, *rest) for name, rest in TENSORS.items()]
    inputs.append(Tensor("filler", Datatype.UINT8, (filler,), bytes(filler)))

    async def scene() -> None:
        async with started(spec(tmp_path)) as process:
            got = await answers(process, Work("", inputs), Work("", inputs[::-1]))
            for answer in got:
                assert {t.name: (t.datatype, t.shape, bytes(t.data)) for t in answer.outputs} == {
                    t.name: (t.datatype, t.shape, t.data) for t in inputs
                }

    asyncio.run(scene())


def test_all_request_fields_reach_the_model(tmp_path: Path) -> None:
    plain = work("facts")
    full = Work(
        "r1",
        plain.inputs,
        ("y", "z"),
        {"a": 1, "b": 2.5, "c": True},
        correlation_id="user-1",
        start=True,
        end=True,
        timeout_us=7,
        priority=3,
    )

    async def scene() -> None:
        async with started(spec(tmp_path)) as process:
            first, second = await answers(process, plain, full)
            assert first.parameters["asked"] == "|()|[('do', 'facts')]|0|False|False|0|0"
            assert second.parameters["asked"] == (
                "r1|('y', 'z')|[('a', 1), ('b', 2.5), ('c', True)]|user-1|True|True|7|3"
            )

    asyncio.run(scene())


@pytest.mark.parametrize("size", [8, 40_000])
def test_inputs_of_a_batch_are_contiguous_in_memory(tmp_path: Path, size: int) -> None:
    async def scene() -> None:
        async with started(spec(tmp_path)) as process:
            works = [work("facts", np.zeros((rows, size), np.float32)) for rows in (1, 2, 3)]
            extra = Tensor("extra", Datatype.UINT8, (3,), b"123")
            got = await answers(
                process, *(Work("", (extra, *each.inputs), parameters=each.parameters) for each in works)
            )
            facts = got[0].parameters
            assert (facts["adjacent"], facts["aligned"], facts["writeable"]) == (True, True, True)

    asyncio.run(scene())


BAD_INPUTS = {
    "too short": (Tensor("x", Datatype.FP32, (4,), bytes(4)), "input 'x'"),
    "too long": (Tensor("x", Datatype.FP32, (1,), bytes(8)), "input 'x' has 8 bytes"),
    "cut": (Tensor("x", Datatype.BYTES, (1,), b"\5\0\0\0ab"), "do not end where"),
    "too many": (Tensor("x", Datatype.BYTES, (2,), b"\1\0\0\0a"), "of shape [2]"),
}


@pytest.mark.parametrize("case", BAD_INPUTS)
def test_malformed_input_fails_only_its_batch(tmp_path: Path, case: str) -> None:
    tensor, text = BAD_INPUTS[case]

    async def scene() -> None:
        async with started(spec(tmp_path)) as process:
            done = await run(process, Work("", (tensor,)))
            assert done.failure is not None
            assert text in done.failure.text
            assert values((await answers(process, work()))[0]) == [1, 2]

    asyncio.run(scene())


def test_64_mib_tensor_round_trips(tmp_path: Path) -> None:
    data = np.arange(16 << 20, dtype=np.float32)

    async def scene() -> None:
        async with started(spec(tmp_path)) as process:
            for _ in range(2):
                (answer,) = await answers(process, work(data=data))
                assert np.array_equal(np.frombuffer(answer.outputs[0].data, np.float32), data)
                del answer

    asyncio.run(scene())


def test_metadata_larger_than_a_packet_round_trips(tmp_path: Path) -> None:
    async def scene() -> None:
        async with started(spec(tmp_path)) as process:
            tensors = [Tensor(f"{i:0200}", Datatype.UINT8, (1,), bytes([i % 256])) for i in range(2000)]
            (answer,) = await answers(process, Work("", tensors))
            assert [bytes(t.data) for t in answer.outputs] == [t.data for t in tensors]

    asyncio.run(scene())


def test_a_thousand_batches_reuse_their_memory(tmp_path: Path) -> None:
    async def scene() -> None:
        async with started(spec(tmp_path)) as process:
            seen = set()
            for number in range(1000):
                size = 10 if number % 2 else 50_000
                (answer,) = await answers(process, work(data=np.full(size, number, np.float32)))
                assert values(answer)[-1] == number
                del answer
                if size > 10 and number % 100 == 0:
                    (facts,) = await answers(process, work("facts", np.zeros(size, np.float32)))
                    seen.add(facts.parameters["memory"])
            assert len(seen) == 1

    asyncio.run(scene())


def test_segment_in_use_is_not_overwritten(tmp_path: Path) -> None:
    async def scene() -> None:
        async with started(spec(tmp_path)) as process:
            first = (await answers(process, work("keep", np.full(50_000, 7, np.float32))))[0]
            view = first.outputs[0].data
            tail = view[-4:]
            del first, view
            for number in range(5):  # neither the view here nor the array that the model keeps
                await answers(process, work(data=np.full(50_000, number, np.float32)))
            assert np.frombuffer(tail, np.float32)[0] == 7
            kept = (await answers(process, work("keep")))[0]
            assert set(values(kept)) == {7}

    asyncio.run(scene())


def test_output_is_passed_to_another_model_without_a_copy(tmp_path: Path) -> None:
    async def scene() -> None:
        async with started(spec(tmp_path)) as first, started(spec(tmp_path)) as second:
            (given,) = await answers(first, work(data=np.arange(50_000, dtype=np.float32)))
            output = given.outputs[0]
            asked = Work("", (output,), parameters={"do": "facts"})
            (facts,) = await answers(second, asked)
            where = _segment_of(output.data)
            assert facts.parameters["memory"] == where
            assert facts.parameters["writeable"] is True
            for _ in range(2):  # what a model does to its inputs nobody else sees, nor the model the next time
                (more,) = await answers(second, Work("", (output,), parameters={"do": "add in place"}))
                assert values(more)[:2] == [1, 2]
            assert values(given)[:2] == [0, 1]
            part = Tensor("x", output.datatype, (20_000,), output.data[40_000:120_000])
            (back,) = await answers(second, Work("", (part,)))
            assert values(back)[:2] == [10_000, 10_001]
            first.stop()
            await until(lambda: not first.pids)
            (back,) = await answers(second, Work("", (output,)))
            assert values(back)[:2] == [0, 1]

    asyncio.run(scene())


def _segment_of(data: Any) -> str:
    address = np.frombuffer(data, np.uint8).ctypes.data
    for line in Path("/proc/self/maps").read_text().splitlines():
        span, _, _, _, inode, *_ = line.split()
        start, end = (int(edge, 16) for edge in span.split("-"))
        if start <= address < end:
            return inode
    raise AssertionError("not mapped")


def test_batch_reports_compute_times(tmp_path: Path) -> None:
    async def scene() -> None:
        async with started(spec(tmp_path)) as process:
            done = await run(process, work())
            assert (
                min(done.compute_start_ns, done.compute_input_ns, done.compute_infer_ns, done.compute_output_ns) > 0
            )

    asyncio.run(scene())


def test_thread_instances_of_one_child_run_concurrently(tmp_path: Path) -> None:
    async def scene() -> None:
        async with started(spec(tmp_path, [HERE, HERE])) as process:
            assert len(process.pids) == 1
            both = await asyncio.gather(run(process, work("meet")), run(process, work("meet"), instance=1))
            assert [done.failure for done in both] == [None, None]

    asyncio.run(scene())


def test_process_instances_run_concurrently_when_threads_are_not_supported(tmp_path: Path) -> None:
    async def scene() -> None:
        async with started(spec(tmp_path, [HERE, HERE], parameters={"threads": "no"})) as process:
            assert len(process.pids) == 2
            do = work("meet in folder")
            both = await asyncio.gather(run(process, do), run(process, do, instance=1))
            assert [done.failure for done in both] == [None, None]

    asyncio.run(scene())


def test_model_without_threads_is_loaded_run_and_closed_in_the_main_thread(tmp_path: Path) -> None:
    async def scene() -> None:
        async with started(spec(tmp_path, parameters={"threads": "no"})) as process:
            (answer,) = await answers(process, work("facts"))
            assert answer.parameters["loader"] is True
        assert (tmp_path / "closed").read_text() == "True"

    asyncio.run(scene())


def test_child_queues_one_batch_and_rejects_another(tmp_path: Path) -> None:
    async def scene() -> None:
        async with started(spec(tmp_path)) as process:
            heard = [Heard(), Heard()]
            for each in heard:
                process.execute(0, [work()], each)
            assert (process.outstanding(0), process.usable(0)) == (2, False)
            with pytest.raises(Refused) as refused:
                process.execute(0, [work()], Heard())
            assert refused.value.kind is Kind.UNAVAILABLE
            await until(lambda: all(each.done for each in heard))
            assert (process.outstanding(0), process.usable(0)) == (0, True)

    asyncio.run(scene())


def test_decoupled_responses_arrive_as_they_are_sent(tmp_path: Path) -> None:
    async def scene() -> None:
        async with started(spec(tmp_path, decoupled=True)) as process:
            heard = Heard()
            process.execute(0, [work("stream", count=3, size=4), work("stream", count=0, size=0)], heard)
            await until(lambda: sum(final for _, _, final in heard.responses) == 2)
            told = [
                (index, answer and answer.parameters["number"], final) for index, answer, final in heard.responses
            ]
            assert told == [(0, 0, False), (0, 1, False), (0, 2, False), (0, None, True), (1, None, True)]
            assert heard.done is not None
            assert heard.done.answers == (None, None)

    asyncio.run(scene())


@pytest.mark.parametrize("size", [10_000, 1_000_000], ids=["within packets", "in segments"])
def test_backpressure_stops_a_model_that_floods_responses(tmp_path: Path, size: int) -> None:
    async def scene() -> None:
        async with started(spec(tmp_path, decoupled=True)) as process:
            heard = Heard()
            count = 40_000_000 // size
            process.execute(0, [work("flood", count=count, size=size)], heard)
            await until(lambda: len(heard.responses) >= 16_000_000 // size)
            (kept,), now = process._supervisors, asyncio.get_running_loop().time()
            before = -1
            while before != len(heard.responses):  # until the child does not send between two signs of life
                before = len(heard.responses)
                kept._owed_since = now
                kept._control.send(Ping())
                await until(lambda: kept.stalled_s(now + 1) == 0)
            assert len(heard.responses) < 20_000_000 // size
            assert [lane.stuck_s(now + 3600) for lane in kept.lanes.values()] == [0]  # to wait for us is not to hang
            got = 0
            while heard.done is None:
                got += len(heard.responses)
                heard.responses.clear()
                await asyncio.sleep(0.005)
            assert got + len(heard.responses) == count + 1
            assert heard.done.failure is None

    asyncio.run(scene())


def test_model_sees_request_cancellation(tmp_path: Path) -> None:
    async def scene() -> None:
        async with started(spec(tmp_path)) as process:
            heard = Heard()
            number = process.execute(0, [work("until cancelled"), work()], heard)
            await until((tmp_path / "running").exists)
            process.cancel(number, 1)
            process.cancel(number + 5, 0)
            await until(lambda: heard.done)
            assert heard.done is not None
            assert [answer and answer.parameters["cancelled"] for answer in heard.done.answers] == [False, True]
            process.cancel(number, 1)

    asyncio.run(scene())


@pytest.mark.parametrize("size", [2, 100_000])
def test_model_calls_another_model(tmp_path: Path, size: int) -> None:
    calls: list[Call] = []

    async def scene() -> None:
        async with started(spec(tmp_path), on_call=calls.append) as process:
            for number in range(3):
                heard = Heard()
                process.execute(0, [work("ask", np.full(size, number, np.float32))], heard)
                await until(lambda: calls)
                call = calls.pop()
                assert (call.model, call.version, call.work.id, call.work.wanted) == ("other", 3, "inner", ("y",))
                tensor = call.work.inputs[0]
                assert set(np.frombuffer(tensor.data, np.float32).tolist()) == {number}
                call.respond(Answer((tensor.named("y"),)), False)
                call.respond(None, True)
                del call, tensor
                await until(lambda heard=heard: heard.done)
                assert heard.done is not None
                (answer,) = heard.done.answers
                assert answer is not None
                assert answer.parameters["heard"] == 2
                assert set(values(answer, "y")) == {number}
            heard = Heard()
            process.execute(0, [work("ask")], heard)
            await until(lambda: calls)
            calls[0].respond(Answer(error=Refused(Kind.NOT_FOUND, "no such model")), True)
            await until(lambda: heard.done)
            assert heard.done is not None
            assert heard.done.answers[0] is not None
            error = heard.done.answers[0].error
            assert error is not None
            assert (error.kind, error.text) == (Kind.NOT_FOUND, "no such model")
        calls[0].respond(None, True)  # the process is gone: nothing happens

    asyncio.run(scene())


def test_model_call_without_permission_is_unsupported(tmp_path: Path) -> None:
    async def scene() -> None:
        async with started(spec(tmp_path)) as process:
            (answer,) = await answers(process, work("ask"))
            assert answer.error is not None
            assert answer.error.kind is Kind.UNSUPPORTED

    asyncio.run(scene())


def test_placement_sets_cpus_nice_environment_and_gpus(tmp_path: Path) -> None:
    environment = (*HERE.environment, ("OMP_NUM_THREADS", "3"))
    place = Placement(cpus=(0, 4096), numa_node=0, nice=3, environment=environment, gpus=("1", "MIG-x"))

    async def scene() -> None:
        async with started(spec(tmp_path, [place, HERE])) as process:
            assert len(process.pids) == 2
            (first,) = await answers(process, work("facts"))
            (second,) = await answers(process, work("facts"), instance=1)
            told = {key: first.parameters[key] for key in ("cpus", "nice", "omp", "gpus")}
            assert told == {"cpus": "0", "nice": os.nice(0) + 3, "omp": "3", "gpus": "1,MIG-x"}
            assert second.parameters["nice"] == os.nice(0)

    asyncio.run(scene())


async def _instances(process: ModelProcess) -> list[tuple[object, object]]:
    told = [await answers(process, work("facts"), instance=i) for i in range(process.instances)]
    return [(answer.parameters["pid"], answer.parameters["instance"]) for (answer,) in told]


@pytest.mark.parametrize("threads", ["yes", "no"])
def test_instances_are_added_and_removed_without_restart(tmp_path: Path, threads: str) -> None:
    async def scene() -> None:
        async with started(spec(tmp_path, parameters={"threads": threads})) as process:
            (first,) = await _instances(process)
            await process.set_instances([HERE] * 3)
            three = await _instances(process)
            assert three[0] == first
            assert [instance for _, instance in three] == [0, 1, 2]
            assert len(process.pids) == (1 if threads == "yes" else 3)
            heard = Heard()
            process.execute(2, [work()], heard)
            await process.set_instances([HERE])
            assert heard.done is not None
            assert heard.done.failure is None
            assert await _instances(process) == [first]
            await until(lambda: len(process.pids) == 1)
            await process.set_instances([HERE] * 2)
            assert len(await _instances(process)) == 2

    asyncio.run(scene())


def test_own_bytes_counts_only_unshared_memory() -> None:
    assert supervisor.own_bytes(1 << 22) == 0
    assert supervisor.own_bytes(os.getpid()) > 1 << 20
