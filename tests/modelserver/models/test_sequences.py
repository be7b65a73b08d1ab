"""Sequences: instance affinity, controls, state, and how they end."""

import asyncio
import os
import signal
from pathlib import Path
from typing import Any

import pytest
from tests.modelserver.models.rig import IO, Server, config, numbers, serving, tensor, until, write

from forebay.core.serving.errors import Kind, Refused

CONTROLS = """
    control_input { name: "START" control { kind: CONTROL_SEQUENCE_START fp32_false_true: [0, 1] } }
    control_input { name: "END" control { kind: CONTROL_SEQUENCE_END int32_false_true: [0, 1] } }
    control_input { name: "READY" control { kind: CONTROL_SEQUENCE_READY int32_false_true: [0, 1] } }
    control_input { name: "ID" control { kind: CONTROL_SEQUENCE_CORRID data_type: TYPE_UINT64 } }
"""
SUM = """
    sums = {}
    def answer(self, request):
        if not get(request, "READY").all():
            return give(get(request) * 0)
        key = int(get(request, "ID").item())
        if get(request, "START").item():
            self.sums[key] = 0.0
        self.sums[key] += get(request).item()
        total = self.sums.pop(key) if get(request, "END").item() else self.sums[key]
        return give(np.full_like(get(request), total))
"""


def sequences(strategy: str, more: str = "", idle_us: int = 60_000_000) -> str:
    """No test is so slow that a sequence becomes idle, but those that say when."""
    idle = f"max_sequence_idle_microseconds: {idle_us}"
    return config(f"sequence_batching {{ {idle} {strategy} {{ {more} }} {CONTROLS} }}", dims="1", max_batch=2)


async def send(server: Server, sequence: int | str, number: float, model: str = "m", **flags: Any) -> float:
    values = await server.numbers(model, tensor("IN", [[number]]), sequence_id=sequence, **flags)
    return float(values[0][0])


@pytest.mark.parametrize("strategy", ["direct", "oldest"])
def test_sequences_have_separate_state(tmp_path: Path, strategy: str) -> None:
    write(tmp_path, "m", sequences(strategy), SUM)

    async def main() -> None:
        async with serving(tmp_path, startup=("m",)) as server:

            async def whole(sequence: int) -> list[float]:
                return [
                    await send(server, sequence, sequence, sequence_start=True),
                    await send(server, sequence, 1),
                    await send(server, sequence, 2, sequence_end=True),
                ]

            totals = await asyncio.gather(*map(whole, range(1, 8)))
            assert totals == [[number, number + 1, number + 3] for number in range(1, 8)]
            assert server.statistics("m", "")[0].success.count == 21

    asyncio.run(main())


def test_answers_of_sequences_keep_their_order_if_that_is_asked_for(tmp_path: Path) -> None:
    gate = tmp_path / "gate"
    slow_first = f"""
    def answer(self, request):
        while get(request)[0, 0] == 0 and Path({str(gate)!r}).exists():
            time.sleep(0.001)
        return give(get(request))
"""
    ordered = sequences("oldest", "preserve_ordering: true").replace("max_batch_size: 2", "max_batch_size: 1")
    root = write(tmp_path / "r", "m", ordered + "instance_group { count: 2 kind: KIND_CPU }", slow_first)

    async def main() -> None:
        async with serving(root, startup=("m",)) as server:
            gate.touch()
            asked = [
                server.ask("m", tensor("IN", [[float(number)]]), sequence_id=number + 1, sequence_start=True)
                for number in range(2)
            ]
            await until("the second has run", lambda: server.statistics("m", "")[0].success.count == 1)
            assert not asked[1].ended.is_set()
            gate.unlink()
            assert [numbers(await each.one()) for each in asked] == [[[0.0]], [[1.0]]]

    asyncio.run(main())


def test_request_outside_a_sequence_is_rejected(tmp_path: Path) -> None:
    write(tmp_path, "m", sequences("direct"), SUM)

    async def main() -> None:
        async with serving(tmp_path, startup=("m",)) as server:
            for fields, text in (
                ({}, "must specify a non-zero or non-empty correlation ID"),
                ({"sequence_id": 5}, "must specify the START flag on the first request of the sequence"),
                (
                    {"sequence_id": "x", "sequence_start": True},
                    "data-type is 'BYTES', but model 'm' expects 'UINT64'",
                ),
            ):
                with pytest.raises(Refused, match=text) as caught:
                    server.ask("m", tensor("IN", [[1.0]]), **fields)
                assert caught.value.kind is Kind.INVALID_ARGUMENT
            with pytest.raises(Refused, match="must specify batch-size 1"):
                server.ask("m", tensor("IN", [[1.0], [2.0]]), sequence_id=5, sequence_start=True)
            assert await send(server, 5, 1, sequence_start=True) == 1
            write(tmp_path, "m", sequences("direct").replace("TYPE_UINT64", "TYPE_UINT32"), SUM)
            await server.load("m", {})
            assert await send(server, 2**40 + 7, 1, sequence_start=True) == 1

    asyncio.run(main())


SHOW = """
    def answer(self, request):
        said = [get(request, name) for name in ("START", "END", "READY", "ID")]
        word = ", ".join(f"{array.dtype}{list(array.shape)}={array.ravel()[0]}" for array in said)
        return pb_utils.InferenceResponse([], error=pb_utils.TritonError(word))
"""


@pytest.mark.parametrize("strategy", ["direct", "oldest"])
@pytest.mark.parametrize(
    ("form", "yes", "no"),
    [
        ("int32_false_true: [ 5, 7 ]", "int32[1, 1]=7", "int32[1, 1]=5"),
        ("fp32_false_true: [ -0.5, 1.5 ]", "float32[1, 1]=1.5", "float32[1, 1]=-0.5"),
        ("bool_false_true: [ false, true ]", "bool[1, 1]=True", "bool[1, 1]=False"),
        ("bool_false_true: [ true, false ]", "bool[1, 1]=False", "bool[1, 1]=True"),
    ],
)
def test_sequence_controls_have_the_configured_type_and_values(
    tmp_path: Path, form: str, yes: str, no: str, strategy: str
) -> None:
    controls = "".join(
        f'control_input {{ name: "{kind}" control {{ kind: CONTROL_SEQUENCE_{kind} {form} }} }}'
        for kind in ("START", "END", "READY")
    )
    id = 'control_input { name: "ID" control { kind: CONTROL_SEQUENCE_CORRID data_type: TYPE_INT64 } }'
    write(
        tmp_path, "m", config(f"sequence_batching {{ {strategy} {{}} {controls} {id} }}", dims="1", max_batch=2), SHOW
    )

    async def main() -> None:
        async with serving(tmp_path, startup=("m",)) as server:
            first = await server.ask("m", tensor("IN", [[1.0]]), sequence_id=9, sequence_start=True).error()
            last = await server.ask("m", tensor("IN", [[1.0]]), sequence_id=9, sequence_end=True).error()
            assert first.text == f"{yes}, {no}, {yes}, int64[1, 1]=9"
            assert last.text == f"{no}, {yes}, {yes}, int64[1, 1]=9"

    asyncio.run(main())


@pytest.mark.parametrize(
    ("kind", "id", "shown"),
    [
        ("TYPE_UINT64", 2**64 - 1, f"uint64[1, 1]={2**64 - 1}"),
        ("TYPE_INT64", 2**62, f"int64[1, 1]={2**62}"),
        ("TYPE_UINT32", 2**32 - 1, f"uint32[1, 1]={2**32 - 1}"),
        ("TYPE_INT32", 77, "int32[1, 1]=77"),
        ("TYPE_STRING", "who", "object[1, 1]=b'who'"),
    ],
)
def test_correlation_id_has_the_configured_type(tmp_path: Path, kind: str, id: int | str, shown: str) -> None:
    source = SHOW.replace('("START", "END", "READY", "ID")', '("ID",)')
    control = f'control_input {{ name: "ID" control {{ kind: CONTROL_SEQUENCE_CORRID data_type: {kind} }} }}'
    write(tmp_path, "m", config(f"sequence_batching {{ direct {{}} {control} }}", dims="1", max_batch=2), source)

    async def main() -> None:
        async with serving(tmp_path, startup=("m",)) as server:
            said = await server.ask("m", tensor("IN", [[1.0]]), sequence_id=id, sequence_start=True).error()
            assert said.text == shown

    asyncio.run(main())


def test_sequences_end_when_their_process_dies(tmp_path: Path) -> None:
    write(tmp_path, "m", sequences("oldest"), SUM)

    async def main() -> None:
        async with serving(tmp_path, startup=("m",)) as server:
            assert await send(server, 5, 1, sequence_start=True) == 1
            (pid,) = server.pids("m")
            os.kill(pid, signal.SIGKILL)
            await until("it is back", lambda: server.pids("m") not in ([], [pid]) and server.ready)
            with pytest.raises(Refused, match="must specify the START flag"):
                await send(server, 5, 2)
            assert await send(server, 5, 3, sequence_start=True) == 3

    asyncio.run(main())


def test_implicit_state_is_passed_to_the_next_request(tmp_path: Path) -> None:
    state = """
        sequence_batching { direct {}
            control_input { name: "START" control { kind: CONTROL_SEQUENCE_START fp32_false_true: [0, 1] } }
            state { input_name: "WAS" output_name: "IS" data_type: TYPE_FP32 dims: [1]
                initial_state { name: "first" data_type: TYPE_FP32 dims: [1] data_file: "ten" } } }
    """
    add = """
    def answer(self, request):
        total = get(request) + get(request, "WAS")
        return pb_utils.InferenceResponse([pb_utils.Tensor("OUT", total), pb_utils.Tensor("IS", total)])
"""
    text = f'backend: "python" max_batch_size: 2 {IO.format(dims="1")} {state}'
    write(tmp_path, "m", text, add)
    (tmp_path / "m" / "initial_state").mkdir()
    (tmp_path / "m" / "initial_state" / "ten").write_bytes(bytes(tensor("IN", [10.0]).data))

    async def main() -> None:
        async with serving(tmp_path, startup=("m",)) as server:
            response = await server.ask("m", tensor("IN", [[1.0]]), sequence_id=1, sequence_start=True).one()
            assert [each.name for each in response.outputs] == ["OUT"]
            assert numbers(response) == [[11.0]]
            assert await send(server, 2, 5, sequence_start=True) == 15
            assert await send(server, 1, 2, outputs=("OUT",)) == 13
            assert await send(server, 1, 3, sequence_end=True) == 16
            assert await send(server, 2, 1, sequence_end=True) == 16
            assert await send(server, 1, 0, sequence_start=True) == 10

    asyncio.run(main())


def test_an_idle_sequence_ends(tmp_path: Path) -> None:
    write(tmp_path, "m", sequences("direct", idle_us=20_000), SUM)

    async def main() -> None:
        async with serving(tmp_path, startup=("m",)) as server:
            assert await send(server, 5, 1, sequence_start=True) == 1

            async def refused() -> bool:
                try:
                    await send(server, 5, 1)
                except Refused:
                    return True
                return False

            while not await refused():
                await asyncio.sleep(0.1)

    asyncio.run(main())


@pytest.mark.parametrize("strategy", ["direct", "oldest"])
def test_slot_of_an_expired_sequence_goes_to_a_waiting_one(tmp_path: Path, strategy: str) -> None:
    one = "" if strategy == "direct" else "max_candidate_sequences: 1"
    text = sequences(strategy, one, idle_us=300_000).replace("max_batch_size: 2", "max_batch_size: 1")
    write(tmp_path, "m", text, SUM)

    async def main() -> None:
        async with serving(tmp_path, startup=("m",)) as server:
            assert await send(server, 50, 1, sequence_start=True) == 1
            late = server.ask(
                "m", tensor("IN", [[7.0]]), id="a", sequence_id=98, sequence_start=True, timeout_us=1000
            )
            assert (await late.error()).text == "timeout of the corresponding sequence has been expired"
            waiting = server.ask("m", tensor("IN", [[7.0]]), sequence_id=99, sequence_start=True, sequence_end=True)
            assert numbers(await waiting.one()) == [[7.0]]
            with pytest.raises(Refused, match="must specify the START flag"):
                await send(server, 50, 1)

    asyncio.run(main())


def test_cancelling_a_request_cancels_the_rest_of_its_sequence(tmp_path: Path) -> None:
    gate = tmp_path / "gate"
    slow = SUM.replace(
        "def answer(self, request):",
        f"def answer(self, request):\n        while Path({str(gate)!r}).exists():\n            time.sleep(0.001)",
        1,
    )
    root = write(tmp_path / "r", "m", sequences("oldest"), slow)

    async def main() -> None:
        async with serving(root, startup=("m",)) as server:
            gate.touch()
            one = tensor("IN", [[1.0]])
            asked = [server.ask("m", one, sequence_id=5, sequence_start=True)]
            await until("it runs", lambda: not server.statistics("m", "")[0].pending)
            asked += [server.ask("m", one, sequence_id=5) for _ in range(2)]
            other = server.ask("m", one, sequence_id=6, sequence_start=True, sequence_end=True)
            assert asked[1].call is not None
            asked[1].call.cancel()
            gate.unlink()
            assert numbers(await asked[0].one()) == [[1.0]]
            assert (await asked[2].error()).kind is Kind.CANCELLED
            assert numbers(await other.one()) == [[1.0]]

    asyncio.run(main())


def test_instances_can_be_scaled_while_sequences_run(tmp_path: Path) -> None:
    one, two = (sequences("oldest") + f"instance_group {{ count: {count} kind: KIND_CPU }}" for count in (1, 2))
    write(tmp_path, "m", one, SUM)

    async def main() -> None:
        async with serving(tmp_path, startup=("m",)) as server:
            for number in (1, 2):
                assert await send(server, number, number, sequence_start=True) == number
            waiting = asyncio.gather(*(send(server, number, number, sequence_start=True) for number in (3, 4)))
            write(tmp_path, "m", two, versions=())
            await server.load("m", {})
            assert await waiting == [3, 4]
            assert await send(server, 1, 5) == 6
            write(tmp_path, "m", one, versions=())
            await server.load("m", {})
            assert server.view("m", "").document["instance_group"][0]["count"] == 1
            assert await send(server, 1, 1, sequence_end=True) == 7
            assert [await send(server, number, 1) for number in (3, 4)] == [4, 5], "they keep their instance"
            assert await send(server, 5, 5, sequence_start=True) == 5
            waiting = asyncio.gather(send(server, 6, 6, sequence_start=True))
            assert await send(server, 3, 0, sequence_end=True) == 4
            assert not waiting.done(), "slots of an instance that goes are not given out again"
            assert await send(server, 4, 0, sequence_end=True) == 5
            await until("the instance is gone", lambda: len(server.pids("m")) == 1)
            assert await send(server, 5, 0, sequence_end=True) == 5
            assert await waiting == [6]

    asyncio.run(main())


def test_instances_that_go_are_kept_if_they_are_wanted_again(tmp_path: Path) -> None:
    counts = {n: sequences("direct") + f"instance_group {{ count: {n} kind: KIND_CPU }}" for n in (1, 2, 3)}
    write(tmp_path, "m", counts[2], SUM)

    async def main() -> None:
        async with serving(tmp_path, startup=("m",)) as server:
            for number in (1, 2, 3):
                assert await send(server, number, number, sequence_start=True) == number
            for count in (1, 2, 1, 3):
                write(tmp_path, "m", counts[count], versions=())
                await server.load("m", {})
                assert [await send(server, number, 1) for number in (1, 2, 3)]
            assert await send(server, 3, 0, sequence_end=True) == 7
            started = [send(server, number, number, sequence_start=True) for number in (4, 5, 6, 7)]
            assert await asyncio.gather(*started) == [4, 5, 6, 7]
            assert [await send(server, number, 0, sequence_end=True) for number in (1, 2)] == [5, 6]

    asyncio.run(main())


def test_a_model_whose_instances_wait_for_their_sequences_can_be_unloaded(tmp_path: Path) -> None:
    one, two = (sequences("direct") + f"instance_group {{ count: {count} kind: KIND_CPU }}" for count in (1, 2))
    write(tmp_path, "m", two, SUM)

    async def main() -> None:
        async with serving(tmp_path, startup=("m",)) as server:
            for number in (1, 2, 3):
                assert await send(server, number, number, sequence_start=True) == number
            write(tmp_path, "m", one, versions=())
            await server.load("m", {})
            await server.unload("m", False)
            await server.load("m", {})
            assert await send(server, 3, 1, sequence_start=True) == 1

    asyncio.run(main())


def test_an_empty_slot_between_sequences_is_not_ready(tmp_path: Path) -> None:
    count = """
    def execute(self, requests):
        ready = sum(int(get(request, "READY").item()) for request in requests)
        return [give(np.full_like(get(request), 10 * len(requests) + ready)) for request in requests]
"""
    write(tmp_path, "m", sequences("direct"), count)

    async def main() -> None:
        async with serving(tmp_path, startup=("m",)) as server:
            assert [await send(server, each, 0, sequence_start=True) for each in (1, 2)] == [11, 21]
            assert [await send(server, each, 0, sequence_end=True) for each in (1, 2)] == [11, 21]
            (counts,) = server.statistics("m", "")
            assert (counts.success.count, counts.inference_count, counts.execution_count) == (4, 4, 4)
            sizes = {size: batch.compute_infer.count for size, batch in counts.batches.items()}
            assert sizes == {1: 2, 2: 2}, "the model runs the empty slot too"

    asyncio.run(main())


TURNS = """
    left = {}
    def execute(self, requests):
        return [self.turn(request, len(requests)) for request in requests]
    def turn(self, request, size):
        key = request.correlation_id()
        if key not in self.left:
            self.left[key] = [int(get(request).item()), 0, int(get(request, "START").item())]
        left = self.left[key]
        left[0] -= 1
        left[1] += size > 1
        if left[0] > 0:
            request.set_release_flags(pb_utils.TRITONSERVER_REQUEST_RELEASE_RESCHEDULE)
            return None
        del self.left[key]
        return give(np.float32([[10 * left[1] + left[2] + int(get(request, "START").item())]]))
"""
"""Takes as many turns as the input says; tells in how many it had company, and in how many turns of the first and
the last the control START was set."""

STREAMED = """
    left = {}
    def execute(self, requests):
        for request in requests:
            key = request.correlation_id()
            left = self.left[key] = self.left.get(key, int(get(request).item())) - 1
            final = pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL if left == 0 else 0
            if not final:
                request.set_release_flags(pb_utils.TRITONSERVER_REQUEST_RELEASE_RESCHEDULE)
            request.get_response_sender().send(give(np.float32([[left]])), final)
"""
START = 'control_input { name: "START" control { kind: CONTROL_SEQUENCE_START fp32_false_true: [0, 1] } }'


def iterative(strategy: str = "direct {}", more: str = "") -> str:
    text = f"sequence_batching {{ iterative_sequence: true {strategy} {START} }} {more}"
    return config(text, dims="1", max_batch=2)


@pytest.mark.parametrize("strategy", ["direct {}", "oldest { max_candidate_sequences: 2 }"])
def test_iterative_requests_are_rescheduled_into_later_batches(tmp_path: Path, strategy: str) -> None:
    write(tmp_path, "m", iterative(strategy), TURNS)

    async def main() -> None:
        async with serving(tmp_path, startup=("m",)) as server:
            assert await server.numbers("m", tensor("IN", [[1.0]])) == [[2.0]]
            asked = [server.ask("m", tensor("IN", [[turns]])) for turns in (30.0, 20.0, 25.0)]
            shared = [numbers(await each.one())[0][0] for each in asked]
            assert [total % 10 for total in shared] == [1, 1, 1]
            assert all(total >= 100 for total in shared)
            (counts,) = server.statistics("m", "")
            assert (counts.success.count, counts.fail.count) == (76, 0)
            assert 38 <= counts.execution_count < 76

    asyncio.run(main())


@pytest.mark.parametrize("kind", ["def", "async def"])
def test_iterative_decoupled_model_streams_responses(tmp_path: Path, kind: str) -> None:
    decoupled = iterative(more="model_transaction_policy { decoupled: true }")
    write(tmp_path, "m", decoupled, STREAMED.replace("def", kind, 1))

    async def main() -> None:
        async with serving(tmp_path, startup=("m",)) as server:
            asked = [server.ask("m", tensor("IN", [[turns]])) for turns in (3.0, 5.0, 4.0)]
            told = [[numbers(each) for each in await one.all()] for one in asked]
            assert told == [[[[float(left)]] for left in reversed(range(turns))] for turns in (3, 5, 4)]

    asyncio.run(main())


def test_cancelling_an_iterative_request_ends_its_iterations(tmp_path: Path) -> None:
    write(tmp_path, "m", iterative(), TURNS)

    async def main() -> None:
        async with serving(tmp_path, startup=("m",)) as server:
            asked = [server.ask("m", tensor("IN", [[1e9]])) for _ in range(3)]
            for one in asked:
                assert one.call is not None
                one.call.cancel()
            assert await server.numbers("m", tensor("IN", [[2.0]])) == [[1.0]]
            (counts,) = server.statistics("m", "")
            assert counts.failures["CANCELED"] == 3
            endless = server.ask("m", tensor("IN", [[1e9]]))
            (pid,) = server.pids("m")
            os.kill(pid, signal.SIGKILL)
            assert (await endless.error()).kind is Kind.UNAVAILABLE

    asyncio.run(main())


def test_reschedule_by_a_non_iterative_model_is_an_error(tmp_path: Path) -> None:
    once = TURNS.replace('int(get(request, "START").item())', "0")
    write(tmp_path, "m", config(dims="1"), once)
    write(tmp_path, "d", config("model_transaction_policy { decoupled: true }", dims="1"), STREAMED)

    async def main() -> None:
        async with serving(tmp_path, startup=("m", "d")) as server:
            for name in ("m", "d"):
                *_, last = await server.ask(name, tensor("IN", [[2.0]])).all()
                assert last.error is not None
                assert "RESCHEDULE, while the model is not configured" in last.error.text

    asyncio.run(main())


def test_sequence_waiting_for_a_slot_fails_on_unload(tmp_path: Path) -> None:
    text = sequences("direct").replace("max_batch_size: 2", "max_batch_size: 1")
    write(tmp_path, "m", text, SUM)

    async def main() -> None:
        async with serving(tmp_path, startup=("m",), drain_s=0.05) as server:
            assert await send(server, 1, 1, sequence_start=True) == 1
            waiting = server.ask("m", tensor("IN", [[1.0]]), sequence_id=2, sequence_start=True)
            await server.unload("m", False)
            assert "has been unloaded" in (await waiting.error()).text

    asyncio.run(main())
