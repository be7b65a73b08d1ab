"""Ensembles: data flow, loading and unloading of steps, and failures in a step."""

import asyncio
from pathlib import Path
from time import monotonic

import pytest
from tests.modelserver.models.rig import BATCH_SIZE, IO, config, ensemble, numbers, serving, tensor, until, write

from forebay.core.serving.config import Datatype
from forebay.core.serving.errors import Kind, Refused
from forebay.core.serving.values import Tensor

ONE = tensor("IN", [[1.0]])
ADD = """
    def answer(self, request):
        return give(get(request) + 1)
"""
DOUBLE = """
    def answer(self, request):
        if get(request)[0, 0] > 100:
            raise ValueError("too much")
        return give(get(request) * 2)
"""
CHAIN = [("add", {"IN": "IN"}, {"OUT": "more"}), ("double", {"IN": "more"}, {"OUT": "OUT"})]
WHOLE = f"max_batch_size: 8 {IO.format(dims='-1')}"


def chain(root: Path) -> None:
    write(root, "add", config(), ADD)
    write(root, "double", config(), DOUBLE)
    ensemble(root, "both", CHAIN, WHOLE)


def test_ensemble_request_runs_all_steps_and_counts_in_each(tmp_path: Path) -> None:
    chain(tmp_path)

    async def main() -> None:
        async with serving(tmp_path, startup=("both",)) as server:
            assert await server.numbers("both", ONE, id="9") == [[4.0]]
            assert await server.numbers("both", tensor("IN", [[1.0] * 100_000] * 2)) == [[4.0] * 100_000] * 2
            for name in ("both", "add", "double"):
                (counts,) = server.statistics(name, "")
                assert (counts.success.count, counts.inference_count, counts.execution_count) == (2, 3, 2)
            steps = [server.statistics(name, "")[0].compute_infer.ns for name in ("add", "double")]
            assert server.statistics("both", "")[0].compute_infer.ns == sum(steps)
            assert server.view("both", "").config.decoupled is False

    asyncio.run(main())


def test_failing_or_unloaded_step_is_named_in_the_error(tmp_path: Path) -> None:
    chain(tmp_path)

    async def main() -> None:
        async with serving(tmp_path, startup=("both",)) as server:
            refused = await server.ask("both", tensor("IN", [[100.0]])).error()
            assert refused.text.startswith("in ensemble 'both', ")
            assert "too much" in refused.text
            assert "double" in refused.text
            assert server.statistics("both", "")[0].fail.count == 1
            await server.unload("double", False)
            reason = server.states("both")["1"][1]
            assert reason == "unloaded: ensemble 'both' depends on 'double' which has no loaded version."
            assert server.ready
            with pytest.raises(Refused, match="no available versions"):
                server.ask("both", ONE)
            await server.load("double", {})
            assert server.ready
            assert await server.numbers("both", ONE) == [[4.0]]

    asyncio.run(main())


WIDER = """
    def answer(self, request):
        array = get(request)
        return give(np.zeros((int(array[0, 0]), *array.shape[1:]), np.float32))
"""
EMPTY = """
    def answer(self, request):
        return pb_utils.InferenceResponse([])
"""


@pytest.mark.parametrize("rows", [0, 4, 11])
def test_step_changing_the_batch_size_is_an_internal_error(tmp_path: Path, rows: int) -> None:
    chain(tmp_path)
    write(tmp_path, "add", config(), WIDER)

    async def main() -> None:
        async with serving(tmp_path, startup=("both",)) as server:
            assert await server.numbers("both", tensor("IN", [[2.0], [2.0]])) == [[0.0], [0.0]]
            refused = await server.ask("both", tensor("IN", [[float(rows)], [2.0]])).error()
            assert refused.kind is Kind.INTERNAL
            assert f"model 'add' gave output 'OUT' as FP32 [{rows}, 1] to a request of batch size 2" in refused.text

    asyncio.run(main())


def test_step_omitting_an_output_is_an_internal_error(tmp_path: Path) -> None:
    chain(tmp_path)
    write(tmp_path, "add", config(), EMPTY)

    async def main() -> None:
        async with serving(tmp_path, startup=("both",)) as server:
            refused = await server.ask("both", ONE).error()
            assert refused.kind is Kind.INTERNAL
            assert "in ensemble 'both', step of model 'double' cannot take what model 'add' made" in refused.text
            assert "missing required input(s) ['IN']" in refused.text

    asyncio.run(main())


def test_step_rejecting_an_input_is_a_client_error_only_for_client_inputs(tmp_path: Path) -> None:
    two = 'input { name: "MORE" data_type: TYPE_FP32 dims: [ 1 ] }'
    write(tmp_path, "add", config(), ADD)
    write(tmp_path, "double", config(dims="1").replace("output", f"{two}\noutput", 1), DOUBLE)
    steps = [("add", {"IN": "IN"}, {"OUT": "t"}), ("double", {"IN": "t", "MORE": "MORE"}, {"OUT": "OUT"})]
    whole = f'{WHOLE} input {{ name: "MORE" data_type: TYPE_FP32 dims: [ -1 ] }}'
    ensemble(tmp_path, "both", steps, whole)
    write(tmp_path, "sum", config("sequence_batching { direct {} }"), ADD)
    ensemble(tmp_path, "late", [("add", {"IN": "IN"}, {"OUT": "t"}), ("sum", {"IN": "t"}, {"OUT": "OUT"})], WHOLE)

    async def main() -> None:
        async with serving(tmp_path, startup=("*",)) as server:
            more = tensor("MORE", [[1.0]])
            assert await server.numbers("both", ONE, more) == [[4.0]]
            wide = await server.ask("both", tensor("IN", [[1.0, 2.0]]), more).error()
            assert (wide.kind, "what model 'add' made" in wide.text) == (Kind.INTERNAL, True)
            own = await server.ask("both", ONE, tensor("MORE", [[1.0, 2.0]])).error()
            assert (own.kind, "input 'MORE'" in own.text) == (Kind.INVALID_ARGUMENT, True)
            sequence = await server.ask("late", ONE).error()
            assert (sequence.kind, "correlation ID" in sequence.text) == (Kind.INVALID_ARGUMENT, True)

    asyncio.run(main())


def test_ensemble_loads_its_steps_and_unloads_those_not_needed_elsewhere(tmp_path: Path) -> None:
    chain(tmp_path)
    ensemble(tmp_path, "twice", [("both", {"IN": "IN"}, {"OUT": "a"}), ("both", {"IN": "a"}, {"OUT": "OUT"})], WHOLE)

    async def main() -> None:
        async with serving(tmp_path, startup=("double", "both")) as server:
            await server.load("twice", {})
            assert await server.numbers("twice", ONE) == [[10.0]]
            await server.unload("twice", True)
            assert [entry.name for entry in server.index(True)] == ["add", "both", "double"]
            await server.unload("both", False)
            assert [entry.name for entry in server.index(True)] == ["add", "double"]
            await server.load("both", {})
            await server.unload("both", True)
            assert [entry.name for entry in server.index(True)] == ["double"]

    asyncio.run(main())


def test_reloaded_step_is_used_immediately(tmp_path: Path) -> None:
    chain(tmp_path)

    async def main() -> None:
        async with serving(tmp_path, startup=("both",)) as server:
            write(tmp_path, "add", config(), ADD.replace("+ 1", "+ 2"))
            await server.load("add", {})
            assert await server.numbers("both", ONE) == [[6.0]]

    asyncio.run(main())


HELD = """
    def initialize(self, args):
        while Path({gate!r}).exists():
            time.sleep(0.001)
    def answer(self, request):
        return give(get(request).astype(np.float32) * 2)
"""


def test_requests_wait_while_reloaded_steps_are_temporarily_incompatible(tmp_path: Path) -> None:
    gate, root = tmp_path / "gate", tmp_path / "r"
    chain(root)

    def typed(name: str) -> str:
        return config().replace(f'name: "{name}" data_type: TYPE_FP32', f'name: "{name}" data_type: TYPE_INT32')

    async def main() -> None:
        async with serving(root, startup=("both",)) as server:
            assert await server.numbers("both", ONE) == [[4.0]]
            gate.touch()
            source = ADD.replace("get(request) + 1", "(get(request) + 5).astype(np.int32)")
            write(root, "add", typed("OUT"), source)
            write(root, "double", typed("IN"), HELD.format(gate=str(gate)))
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(server.load("both", {}))
                await until("reloaded", lambda: server.view("add", "").config.outputs[0].datatype is Datatype.INT32)
                waits, left = server.ask("both", ONE), server.ask("both", ONE)
                refused = await server.ask("both", ONE, sequence_id=7).error()
                assert (refused.kind, refused.retry_after_s) == (Kind.UNAVAILABLE, 1)
                late = await server.ask("both", ONE, deadline=monotonic() + 0.1).error()
                assert late.kind is Kind.UNAVAILABLE
                assert left.call is not None
                left.call.cancel()
                assert not waits.responses
                gate.unlink()
                assert numbers(await waits.one()) == [[12.0]]
            assert await server.numbers("both", ONE) == [[12.0]]
            assert not left.responses

    asyncio.run(main())


def test_incompatible_reloaded_step_makes_requests_unavailable_not_invalid(tmp_path: Path) -> None:
    chain(tmp_path)

    async def main() -> None:
        async with serving(tmp_path, startup=("both",)) as server:
            write(tmp_path, "add", config().replace("TYPE_FP32", "TYPE_INT32", 1), ADD)
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(server.load("add", {}))
                await until("reloaded", lambda: server.view("add", "").config.inputs[0].datatype is Datatype.INT32)
                refused = await server.ask("both", ONE).error()
                assert (refused.kind, "retry" in refused.text) == (Kind.UNAVAILABLE, True)
            assert "inconsistent data type" in server.states("both")["1"][1]

    asyncio.run(main())


def test_reloaded_ensemble_is_validated_against_its_reloaded_steps(tmp_path: Path) -> None:
    chain(tmp_path)

    async def main() -> None:
        async with serving(tmp_path, startup=("both",)) as server:
            write(tmp_path, "add", config().replace("TYPE_FP32", "TYPE_INT32", 1), ADD)
            with pytest.raises(Refused, match="inconsistent data type"):
                await server.load("both", {})

    asyncio.run(main())


def test_invalid_ensembles_are_not_loaded_and_report_the_reason(tmp_path: Path) -> None:
    chain(tmp_path)
    ensemble(tmp_path, "lacks", [("nobody", {"IN": "IN"}, {"OUT": "OUT"})], WHOLE)
    ensemble(tmp_path, "wrong", [("add", {"INPUT": "IN"}, {"OUT": "OUT"})], WHOLE)
    ensemble(tmp_path, "egg", [("hen", {"IN": "IN"}, {"OUT": "OUT"})], WHOLE)
    ensemble(tmp_path, "hen", [("egg", {"IN": "IN"}, {"OUT": "OUT"})], WHOLE)

    async def main() -> None:
        async with serving(tmp_path, startup=("*",)) as server:
            assert [entry.name for entry in server.index(True)] == ["add", "both", "double"]
            said = {entry.name: entry.reason for entry in server.index(False)}
            assert "contains models that are not available or ambiguous: nobody" in said["lacks"]
            assert "INPUT" in said["wrong"]
            assert "circular dependency between ensembles" in said["egg"]
            assert "circular dependency between ensembles" in said["hen"]

    asyncio.run(main())


@pytest.mark.parametrize("name", ["outer", "inner", "around"])
def test_an_ensemble_whose_steps_cannot_be_loaded_leaves_the_server_ready(tmp_path: Path, name: str) -> None:
    chain(tmp_path)
    write(tmp_path, "unreadable", "max_batch_size: many")
    ensemble(tmp_path, "inner", [("nobody", {"IN": "IN"}, {"OUT": "OUT"})], WHOLE)
    ensemble(tmp_path, "outer", [("inner", {"IN": "IN"}, {"OUT": "OUT"})], WHOLE)
    ensemble(tmp_path, "around", [("unreadable", {"IN": "IN"}, {"OUT": "OUT"})], WHOLE)

    async def main() -> None:
        async with serving(tmp_path, startup=("both",)) as server:
            for _ in range(2):
                with pytest.raises(Refused, match=f"load failed for model '{name}'"):
                    await server.load(name, {})
                assert server.ready
        async with serving(tmp_path, startup=("inner",)) as server:
            with pytest.raises(Refused, match="load failed for model"):
                await server.load(name, {})
            assert not server.ready, "a step was to be served from the start"

    asyncio.run(main())


def test_only_steps_for_requested_outputs_run(tmp_path: Path) -> None:
    chain(tmp_path)
    outputs = (
        'output { name: "A" data_type: TYPE_FP32 dims: [-1] } output { name: "B" data_type: TYPE_FP32 dims: [-1] }'
    )
    steps = [("add", {"IN": "IN"}, {"OUT": "A"}), ("double", {"IN": "IN"}, {"OUT": "B"})]
    ensemble(
        tmp_path, "fork", steps, f'max_batch_size: 8 input {{ name: "IN" data_type: TYPE_FP32 dims: [-1] }} {outputs}'
    )

    async def main() -> None:
        async with serving(tmp_path, startup=("fork",)) as server:
            response = await server.ask("fork", tensor("IN", [[5.0]])).one()
            assert (numbers(response, "A"), numbers(response, "B")) == ([[6.0]], [[10.0]])
            response = await server.ask("fork", tensor("IN", [[5.0]]), outputs=("B",)).one()
            assert [each.name for each in response.outputs] == ["B"]
            assert server.statistics("add", "")[0].success.count == 1

    asyncio.run(main())


def test_cancelled_ensemble_request_releases_its_steps(tmp_path: Path) -> None:
    gate = tmp_path / "gate"
    root = tmp_path / "r"
    chain(root)
    write(root, "add", config(), f"    def answer(self, request):\n        while Path({str(gate)!r}).exists():\n"
          "            time.sleep(0.001)\n        return give(get(request))\n")  # fmt: skip

    async def main() -> None:
        async with serving(root, startup=("both",)) as server:
            gate.touch()
            asked = [server.ask("both", ONE) for _ in range(3)]
            await until("they run", lambda: server.statistics("add", "")[0].pending == 2)
            for each in asked[:2]:
                assert each.call is not None
                each.call.cancel()
            gate.unlink()
            assert numbers(await asked[2].one()) == [[2.0]]
            assert not asked[0].ended.is_set()
            (counts,) = server.statistics("both", "")
            assert (counts.success.count, counts.failures["CANCELED"]) == (1, 2)
            await server.unload("both", True)
            assert server.index(True) == []

    asyncio.run(main())


def test_model_calls_return_results_and_errors(tmp_path: Path) -> None:
    chain(tmp_path)
    calls = """
    def answer(self, request):
        array = get(request)
        name = "nobody" if array[0, 0] < 0 else "double"
        asked = pb_utils.InferenceRequest(model_name=name, requested_output_names=["OUT"],
                                          inputs=[pb_utils.Tensor("IN", array)])
        answer = asked.exec()
        if answer.has_error():
            return pb_utils.InferenceResponse(error=answer.error())
        return give(pb_utils.get_output_tensor_by_name(answer, "OUT").as_numpy() + 1)
"""
    write(tmp_path, "calls", config(), calls)

    async def main() -> None:
        async with serving(tmp_path, startup=("*",)) as server:
            asked = [server.ask("calls", tensor("IN", [[float(number)]])) for number in range(5)]
            assert [numbers(await each.one()) for each in asked] == [[[2.0 * number + 1]] for number in range(5)]
            assert "Model 'nobody' is not ready" in (await server.ask("calls", tensor("IN", [[-1.0]])).error()).text
            assert "too much" in (await server.ask("calls", tensor("IN", [[500.0]])).error()).text
            assert server.statistics("double", "")[0].success.count == 5

    asyncio.run(main())


def test_models_call_models_of_bf16(tmp_path: Path) -> None:
    pytest.importorskip("torch")
    same = "    def answer(self, request):\n        tensor = pb_utils.get_input_tensor_by_name(request, 'IN')\n"
    give = "pb_utils.Tensor.from_dlpack('OUT', tensor.to_dlpack())"
    calls = (
        same
        + """
        asked = pb_utils.InferenceRequest(model_name="same", requested_output_names=["OUT"],
                                          inputs=[pb_utils.Tensor.from_dlpack("IN", tensor.to_dlpack())])
        answer = asked.exec()
        return pb_utils.InferenceResponse(answer.output_tensors(), error=answer.error())
"""
    )
    bf16 = config().replace("TYPE_FP32", "TYPE_BF16")
    write(tmp_path, "same", bf16, f"{same}        return pb_utils.InferenceResponse([{give}])\n")
    write(tmp_path, "calls", bf16, calls)

    async def main() -> None:
        async with serving(tmp_path, startup=("*",)) as server:
            answer = await server.ask("calls", Tensor("IN", Datatype.BF16, (1, 2), b"\x80\x3f\x00\x40")).one()
            assert answer.error is None, answer.error.text
            assert [(each.datatype, bytes(each.data)) for each in answer.outputs] == [
                (Datatype.BF16, b"\x80\x3f\x00\x40")
            ]

    asyncio.run(main())


REPEAT = """
    def execute(self, requests):
        for request in requests:
            sender = request.get_response_sender()
            for number in range(int(get(request)[0])):
                sender.send(give(np.array([number], dtype=np.float32)))
            sender.send(flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)
"""
DECOUPLED = "model_transaction_policy { decoupled: true }"


def test_decoupled_model_sends_any_number_of_responses_alone_and_in_an_ensemble(tmp_path: Path) -> None:
    write(tmp_path, "repeat", config(DECOUPLED, max_batch=0), REPEAT)
    write(tmp_path, "add", config(max_batch=0), ADD)
    steps = [("repeat", {"IN": "IN"}, {"OUT": "a"}), ("add", {"IN": "a"}, {"OUT": "OUT"})]
    ensemble(tmp_path, "stream", steps, IO.format(dims="-1"))

    async def main() -> None:
        async with serving(tmp_path, startup=("*",)) as server:
            assert server.view("stream", "").config.decoupled
            for count in (0, 1, 4):
                given = tensor("IN", [float(count)])
                responses = await server.ask("repeat", given).all()
                assert [numbers(each) for each in responses] == [[float(each)] for each in range(count)]
                responses = await server.ask("stream", given).all()
                assert [numbers(each) for each in responses] == [[each + 1.0] for each in range(count)]
            await until("the last is counted", lambda: server.statistics("repeat", "")[0].success.count == 6)
            (counts,) = server.statistics("repeat", "")
            assert {key: value.success.count for key, value in counts.responses.items()} == {
                "0": 4, "1": 2, "2": 2, "3": 2, "4": 0
            }  # fmt: skip
            assert {key: value.empty_response.count for key, value in counts.responses.items()} == {
                "0": 2, "1": 2, "2": 0, "3": 0, "4": 2
            }  # fmt: skip

    asyncio.run(main())


BROKEN = """
    def execute(self, requests):
        for request in requests:
            sender = request.get_response_sender()
            sender.send(pb_utils.InferenceResponse([], error=pb_utils.TritonError("broken")))
            sender.send(flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)
"""


def test_decoupled_step_may_end_after_its_error(tmp_path: Path) -> None:
    write(tmp_path, "repeat", config(DECOUPLED, max_batch=0), BROKEN)
    ensemble(tmp_path, "stream", [("repeat", {"IN": "IN"}, {"OUT": "OUT"})], IO.format(dims="-1"))
    failures: list[object] = []

    async def main() -> None:
        asyncio.get_running_loop().set_exception_handler(lambda loop, context: failures.append(context))
        async with serving(tmp_path, startup=("*",)) as server:
            error = await server.ask("stream", tensor("IN", [1.0])).error()
            assert error.text == "in ensemble 'stream', step of model 'repeat': broken"
            step = server.itself._collection.find("repeat", -1)
            await until("the step has ended", lambda: not step.inflight)

    asyncio.run(main())
    assert not failures


def test_unloading_an_ensemble_fails_its_requests_after_the_drain_time(tmp_path: Path) -> None:
    gate = tmp_path / "gate"
    root = tmp_path / "r"
    chain(root)
    write(root, "add", config("dynamic_batching {}"), BATCH_SIZE.format(gate=str(gate)))

    async def main() -> None:
        async with serving(root, startup=("both",), drain_s=0.2) as server:
            gate.touch()
            asked = [server.ask("both", ONE) for _ in range(3)]
            await server.unload("both", False)
            for each in asked:
                assert (await each.error()).text == "model 'both' version 1 has been unloaded"
            gate.unlink()
            assert await server.numbers("add", ONE) == [[1.0]]

    asyncio.run(main())


def test_max_inflight_requests_limits_a_step_across_requests(tmp_path: Path) -> None:
    gate = tmp_path / "gate"
    root = tmp_path / "r"
    write(root, "count", config("dynamic_batching {}"), BATCH_SIZE.format(gate=str(gate)))
    steps = [("count", {"IN": "IN"}, {"OUT": "OUT"})]
    ensemble(root, "one", steps, WHOLE, "max_inflight_requests: 1")

    async def main() -> None:
        async with serving(root, startup=("one",)) as server:
            gate.touch()
            asked = [server.ask("one", ONE) for _ in range(4)]
            await until("one runs", lambda: server.statistics("count", "")[0].pending == 0)
            assert asked[2].call is not None
            asked[2].call.cancel()
            gate.unlink()
            assert [numbers(await each.one()) for each in (asked[0], asked[1], asked[3])] == [[[1.0]]] * 3
            assert set(server.statistics("count", "")[0].batches) == {1}

    asyncio.run(main())


def test_ensemble_labels_come_from_the_step_producing_the_output(tmp_path: Path) -> None:
    chain(tmp_path)
    labelled = config().replace('output { name: "OUT"', 'output { name: "OUT" label_filename: "names"')
    write(tmp_path, "double", labelled, DOUBLE)
    (tmp_path / "double" / "names").write_text("cat\ndog\n")

    async def main() -> None:
        async with serving(tmp_path, startup=("both",)) as server:
            assert list(server.labels("both", "", "OUT")) == ["cat", "dog"]
            assert list(server.labels("add", "1", "OUT")) == []

    asyncio.run(main())
