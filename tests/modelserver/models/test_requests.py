"""Requests to a single model: validation, batches, queues, responses, statistics."""

import asyncio
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tests.contract.tensor.models import build_sums
from tests.modelserver.models.rig import BATCH_SIZE, config, numbers, serving, tensor, until, write

from forebay.core.serving.cache import ENTRY_BYTES
from forebay.core.serving.config import Datatype, ModelConfig, TensorSpec
from forebay.core.serving.errors import Kind, Refused
from forebay.core.serving.values import InferRequest, InferResponse, Tensor
from forebay.modelserver.models.running.inputs import Contract
from forebay.modelserver.telemetry.latencies import Latencies
from forebay.modelserver.telemetry.metrics import ServerMetrics

ONE = tensor("IN", [[1.0]])
ID = "[request id: <id_unknown>] "
TYPED = """
backend: "python"
max_batch_size: 4
input { name: "IN" data_type: TYPE_FP32 dims: [2, -1] }
input { name: "TEXT" data_type: TYPE_STRING dims: [1] optional: true }
output { name: "OUT" data_type: TYPE_FP32 dims: [2, -1] }
"""


def bytes_tensor(data: bytes, shape: tuple[int, ...] = (1, 1)) -> Tensor:
    return Tensor("TEXT", Datatype.BYTES, shape, data)


GOOD = tensor("IN", [[[1.0], [2.0]]])
BAD: list[tuple[tuple[Tensor, ...], dict[str, Any], str]] = [
    (
        (),
        {},
        ID + "expected number of inputs between 1 and 2 but got 0 inputs for model 'm'. Got input(s) [], but missing "
        "required input(s) ['IN']. Please provide all required input(s).",
    ),
    ((GOOD, tensor("X", [[1.0]])), {}, "unexpected inference input 'X' for model 'm'"),
    ((GOOD, GOOD), {}, ID + "input given more than once for model 'm'"),
    ((GOOD,), {"outputs": ("Y",)}, "unexpected inference output 'Y' for model 'm'"),
    (
        (tensor("IN", [[[1.0], [2.0]]] * 5),),
        {},
        ID + "inference request batch-size must be <= 4 for 'm'",
    ),
    ((Tensor("IN", Datatype.FP32, (-3, 2, 1), bytes(8)),), {}, ID + "inference request batch-size must be <= 4"),
    (
        (GOOD, bytes_tensor(b"\1\0\0\0a" * 2, (2, 1))),
        {},
        ID + "input 'IN' batch size does not match other inputs for 'm'",
    ),
    (
        (Tensor("IN", Datatype.FP32, (), b""),),
        {},
        ID + "input 'IN' has no shape but model requires batch dimension for 'm'",
    ),
    (
        (tensor("IN", [[[1], [2]]], "int32"),),
        {"id": "7"},
        "[request id: 7] inference input 'IN' data-type is 'INT32', but model 'm' expects 'FP32'",
    ),
    ((Tensor("IN", Datatype.FP32, (1, 2, -1), b""),), {}, ID + "All input dimensions should be specified for input"),
    ((Tensor("IN", Datatype.FP32, (1, -2, -3), bytes(24)),), {}, ID + "All input dimensions should be specified"),
    (
        (tensor("IN", [[[1.0], [2.0], [3.0]]]),),
        {},
        ID + "unexpected shape for input 'IN' for model 'm'. Expected [-1,2,-1], got [1,3,1]. NOTE: Setting",
    ),
    (
        (Tensor("IN", Datatype.FP32, (1, 2, 1), bytes(12)),),
        {},
        ID + "input byte size mismatch for input 'IN' for model 'm'. Expected 8, got 12",
    ),
    (
        (Tensor("IN", Datatype.FP32, (0, 2, 1), bytes(8)),),
        {},
        ID + "input byte size mismatch for input 'IN' for model",
    ),
    (
        (GOOD, bytes_tensor(b"\1\0\0")),
        {},
        ID
        + "incomplete string length indicator for inference input 'TEXT' for model 'm', expecting 4 bytes but only "
        "3 bytes available. Please make sure the string length indicator is in one buffer.",
    ),
    (
        (GOOD, bytes_tensor(b"\1\0\0\0a" * 2)),
        {},
        ID + "unexpected number of string elements 2 for inference input 'TEXT' for model 'm', expecting 1",
    ),
    (
        (GOOD, bytes_tensor(b"")),
        {},
        ID + "expected 1 string elements for inference input 'TEXT' for model 'm', got 0",
    ),
    ((GOOD, bytes_tensor(b"\2\0\0\0a")), {}, ID + "incomplete string data for inference input 'TEXT' for model 'm'"),
]


def test_number_of_string_elements_is_limited() -> None:
    described = ModelConfig("m", "python", inputs=(TensorSpec("TEXT", Datatype.BYTES, (-1,)),))
    request = InferRequest("m", "", "", (Tensor("TEXT", Datatype.BYTES, (3,), b"\0\0\0\0" * 3),))
    assert Contract(described, strings_max=3).check(request).inputs == request.inputs
    with pytest.raises(Refused, match="has 3 string elements, more than the 2 that --max-string-elements allows"):
        Contract(described, strings_max=2).check(request)


def test_invalid_request_is_rejected_and_not_counted(tmp_path: Path) -> None:
    write(tmp_path, "m", TYPED)

    async def main() -> None:
        async with serving(tmp_path, startup=("m",)) as server:
            for inputs, fields, text in BAD:
                with pytest.raises(Refused) as caught:
                    server.ask("m", *inputs, **fields)
                assert caught.value.kind is Kind.INVALID_ARGUMENT
                assert caught.value.text.startswith(text)
            assert await server.numbers("m", GOOD, outputs=("OUT",)) == [[[1.0], [2.0]]]
            assert await server.numbers("m", GOOD, bytes_tensor(b"\1\0\0\0a")) == [[[1.0], [2.0]]]
            (counts,) = server.statistics("m", "1")
            assert (counts.success.count, counts.fail.count) == (2, 0)
            for version, text in (("x", "(details: stoll)"), ("-3", "an integral value > 0")):
                with pytest.raises(Refused) as caught:
                    server.ask("m", GOOD, version=version)
                assert text in caught.value.text

    asyncio.run(main())


def test_statistics_cover_only_serving_versions(tmp_path: Path) -> None:
    write(tmp_path, "m", config(), versions=(1, 2))
    write(tmp_path, "n", config())

    async def main() -> None:
        async with serving(tmp_path, startup=("*",)) as server:
            assert [(each.name, each.version) for each in server.statistics("", "")] == [("m", "2"), ("n", "1")]
            with pytest.raises(Refused, match=r"^requested model 'x' is not available$"):
                server.statistics("x", "")
            with pytest.raises(Refused, match=r"^requested model version is not available for model 'm'$"):
                server.statistics("m", "1")

    asyncio.run(main())


def test_requests_queued_behind_a_busy_instance_share_a_batch(tmp_path: Path) -> None:
    gate = tmp_path / "gate"
    root = write(tmp_path / "r", "m", config("dynamic_batching {}"), BATCH_SIZE.format(gate=str(gate)))

    async def main() -> None:
        async with serving(root, startup=("m",)) as server:
            gate.touch()
            first = server.ask("m", ONE)
            await until("runs", lambda: not server.statistics("m", "")[0].pending)
            late = [server.ask("m", ONE) for _ in range(3)]
            odd = server.ask("m", tensor("IN", [[1.0, 2.0]]))
            rows = server.ask("m", tensor("IN", [[1.0, 2.0]] * 4))
            assert server.statistics("m", "")[0].pending == 5
            gate.unlink()
            assert numbers(await first.one()) == [[1.0]]
            assert [numbers(await each.one()) for each in late] == [[[3.0]]] * 3
            assert numbers(await odd.one()) == [[2.0, 2.0]]
            assert numbers(await rows.one()) == [[2.0, 2.0]] * 4
            (counts,) = server.statistics("m", "")
            assert {size: batch.compute_infer.count for size, batch in counts.batches.items()} == {1: 1, 3: 1, 5: 1}
            assert (counts.inference_count, counts.execution_count) == (9, 3)
            assert counts.success.count == counts.queue.count == counts.compute_infer.count == 6
            assert counts.last_inference_ms > 0
            assert counts.success.ns > counts.queue.ns > 0

    asyncio.run(main())


def test_without_dynamic_batching_each_request_runs_alone(tmp_path: Path) -> None:
    write(tmp_path, "m", config(), BATCH_SIZE.format(gate=str(tmp_path / "gate")))

    async def main() -> None:
        async with serving(tmp_path, startup=("m",)) as server:
            asked = [server.ask("m", ONE) for _ in range(5)]
            assert [numbers(await each.one()) for each in asked] == [[[1.0]]] * 5

    asyncio.run(main())


def test_queue_is_bounded_and_queued_requests_time_out_or_can_be_cancelled(tmp_path: Path) -> None:
    gate = tmp_path / "gate"
    policy = "dynamic_batching { default_queue_policy { max_queue_size: 3 default_timeout_microseconds: %d } }"
    root = write(tmp_path / "r", "m", config(policy % 0), BATCH_SIZE.format(gate=str(gate)))
    write(root, "hasty", config(policy % 10_000), BATCH_SIZE.format(gate=str(gate)))

    async def main() -> None:
        async with serving(root, startup=("*",)) as server:
            gate.touch()
            first = server.ask("m", ONE)
            await until("runs", lambda: not server.statistics("m", "")[0].pending)
            waiting = [server.ask("m", ONE) for _ in range(3)]
            with pytest.raises(Refused) as caught:
                server.ask("m", ONE, id="5")
            assert (caught.value.kind, caught.value.text) == (
                Kind.UNAVAILABLE,
                "[request id: 5] Exceeds maximum queue size",
            )
            hasty = server.ask("hasty", ONE)
            await until("runs", lambda: not server.statistics("hasty", "")[0].pending)
            late = server.ask("hasty", ONE)
            refused = await late.error()
            assert (refused.kind, refused.text) == (Kind.UNAVAILABLE, "Request timeout expired")
            for asked in (waiting[0], first):
                assert asked.call is not None
                asked.call.cancel()
                asked.call.cancel()
            gate.unlink()
            assert [numbers(await each.one()) for each in waiting[1:]] == [[[2.0]]] * 2
            assert numbers(await hasty.one()) == [[1.0]]
            assert not first.ended.is_set()
            assert not waiting[0].ended.is_set()
            assert server.statistics("hasty", "")[0].failures["REJECTED"] == 1
            (counts,) = server.statistics("m", "")
            assert (counts.success.count, counts.failures["CANCELED"]) == (3, 1)

    asyncio.run(main())


def test_queued_bytes_and_requests_of_a_model_are_bounded(tmp_path: Path) -> None:
    gate = tmp_path / "gate"
    root = write(tmp_path / "r", "m", config("dynamic_batching {}"), BATCH_SIZE.format(gate=str(gate)))

    async def main() -> None:
        async with serving(root, startup=("m",), held_bytes_max=12, queue_max=3) as server:
            gate.touch()
            asked = [server.ask("m", tensor("IN", [[1.0] * 100]))]
            with pytest.raises(Refused, match="Exceeds maximum queue size"):
                server.ask("m", ONE)
            gate.unlink()
            await asked[0].one()
            gate.touch()
            first = server.ask("m", ONE)
            await until("runs", lambda: not server.statistics("m", "")[0].pending)
            asked = [server.ask("m", ONE), server.ask("m", ONE)]
            with pytest.raises(Refused, match="Exceeds maximum queue size"):
                server.ask("m", ONE)
            gate.unlink()
            assert [numbers(await each.one()) for each in (first, *asked)] == [[[1.0]], [[2.0]], [[2.0]]]

    asyncio.run(main())


def test_requests_with_higher_priority_run_first(tmp_path: Path) -> None:
    gate, order = tmp_path / "gate", []
    levels = "dynamic_batching { priority_levels: 3 default_priority_level: 2 }"
    root = write(tmp_path / "r", "m", config(levels, max_batch=1), BATCH_SIZE.format(gate=str(gate)))

    async def main() -> None:
        async with serving(root, startup=("m",)) as server:
            gate.touch()
            first = server.ask("m", ONE)
            await until("runs", lambda: not server.statistics("m", "")[0].pending)
            asked = {level: server.ask("m", ONE, priority=level) for level in (3, 0, 1)}
            gate.unlink()

            async def note(level: int) -> None:
                await asked[level].one()
                order.append(level)

            await asyncio.gather(first.one(), *map(note, asked))
            assert order == [1, 0, 3]

    asyncio.run(main())


def test_preserve_ordering_returns_responses_in_request_order(tmp_path: Path) -> None:
    gate, order = tmp_path / "gate", []
    ordered = "dynamic_batching { preserve_ordering: true } instance_group { count: 2 kind: KIND_CPU }"
    slow_first = f"""
    def answer(self, request):
        while get(request)[0, 0] == 0 and Path({str(gate)!r}).exists():
            time.sleep(0.001)
        return give(get(request))
"""
    root = write(tmp_path / "r", "m", config(ordered, max_batch=1), slow_first)

    async def main() -> None:
        async with serving(root, startup=("m",)) as server:
            gate.touch()
            asked = [server.ask("m", tensor("IN", [[float(number)]])) for number in range(3)]
            await until("the others have run", lambda: server.statistics("m", "")[0].success.count == 2)
            assert not any(each.ended.is_set() for each in asked)
            gate.unlink()

            async def note(number: int) -> None:
                assert numbers(await asked[number].one()) == [[number]]
                order.append(number)

            await asyncio.gather(*map(note, (2, 1, 0)))
            assert order == [0, 1, 2]

    asyncio.run(main())


def test_response_cache_returns_cached_responses_until_reload(tmp_path: Path) -> None:
    count = """
    seen = 0
    def answer(self, request):
        self.seen += 1
        return give(get(request) + 10 * self.seen)
"""
    write(tmp_path, "m", config("response_cache { enable: true }", max_batch=0), count)

    async def main() -> None:
        async with serving(tmp_path, startup=("m",), cache_bytes=10_000) as server:
            assert await server.numbers("m", tensor("IN", [1.0])) == [11.0]
            assert await server.numbers("m", tensor("IN", [1.0]), id="other") == [11.0]
            assert await server.numbers("m", tensor("IN", [2.0])) == [22.0]
            assert await server.numbers("m", tensor("IN", [1.0]), outputs=("OUT",)) == [31.0]
            (counts,) = server.statistics("m", "")
            assert (counts.success.count, counts.cache_hit.count, counts.cache_miss.count) == (4, 1, 3)
            assert (counts.inference_count, counts.execution_count, counts.compute_infer.count) == (3, 3, 3)
            show = ServerMetrics(server.itself, Latencies())
            assert "nv_cache_num_entries" not in show.render().decode()
            show.cache = server.cache
            lines = show.render().decode().splitlines()
            assert {line for line in lines if line.startswith("nv_cache_num") and "{" not in line} == {
                "nv_cache_num_entries 3", "nv_cache_num_evictions 0", "nv_cache_num_hits 1",
                "nv_cache_num_misses 3", "nv_cache_num_lookups 4",
            }  # fmt: skip
            assert f"nv_cache_util {3 * (ENTRY_BYTES + 4) / 10_000}" in lines
            assert min(server.cache.lookup_ns, server.cache.insertion_ns) > 0
            assert f"nv_cache_lookup_duration {server.cache.lookup_ns // 1000}" in lines
            assert f"nv_cache_insertion_duration {server.cache.insertion_ns // 1000}" in lines
            write(tmp_path, "m", config("response_cache { enable: true }", max_batch=0))
            await server.load("m", {})
            assert await server.numbers("m", tensor("IN", [1.0])) == [1.0]

    asyncio.run(main())


def test_reshape_maps_between_client_and_backend_shapes(tmp_path: Path) -> None:
    tell = """
    def answer(self, request):
        assert get(request).shape == (2, 3, 1), get(request).shape
        return give(get(request))
"""
    reshaped = """
        backend: "python" max_batch_size: 4
        input { name: "IN" data_type: TYPE_FP32 dims: [-1] reshape { shape: [-1, 1] } }
        output { name: "OUT" data_type: TYPE_FP32 dims: [-1] reshape { shape: [-1, 1] } }
    """
    write(tmp_path, "m", reshaped, tell)

    async def main() -> None:
        async with serving(tmp_path, startup=("m",)) as server:
            assert await server.numbers("m", tensor("IN", [[1, 2, 3]] * 2)) == [[1, 2, 3]] * 2

    asyncio.run(main())


TWICE = """
    def execute(self, requests):
        arrays = [np.concatenate([get(request)] * 2) for request in requests]
        return [give(array) for array in arrays]
"""
SENT = """
    def execute(self, requests):
        for request in requests:
            request.get_response_sender().send(give(np.concatenate([get(request)] * 2)), 1)
"""


@pytest.mark.parametrize("source", [TWICE, SENT])
def test_response_with_the_wrong_batch_size_is_an_internal_error(tmp_path: Path, source: str) -> None:
    write(tmp_path, "m", config("dynamic_batching {}"), source)
    write(tmp_path, "bare", config(max_batch=0), TWICE)
    write(tmp_path, "many", config("model_transaction_policy { decoupled: true }"), SENT)

    async def main() -> None:
        async with serving(tmp_path, startup=("*",)) as server:
            refused = await server.ask("m", tensor("IN", [[1.0, 2.0]] * 3)).error()
            assert refused.kind is Kind.INTERNAL
            assert "model 'm' gave output 'OUT' as FP32 [6, 2] to a request of batch size 3" in refused.text
            assert await server.numbers("bare", tensor("IN", [1.0])) == [1.0, 1.0]
            assert await server.numbers("many", ONE) == [[1.0], [1.0]]

    asyncio.run(main())


def test_ragged_requests_share_a_batch(tmp_path: Path) -> None:
    gate = tmp_path / "gate"
    ragged = config("dynamic_batching {}").replace('name: "IN"', 'name: "IN" allow_ragged_batch: true')
    root = write(tmp_path / "r", "m", ragged, BATCH_SIZE.format(gate=str(gate)))

    async def main() -> None:
        async with serving(root, startup=("m",)) as server:
            gate.touch()
            first = server.ask("m", ONE)
            await until("runs", lambda: not server.statistics("m", "")[0].pending)
            asked = [server.ask("m", tensor("IN", [[1.0] * width])) for width in (1, 2, 3)]
            gate.unlink()
            assert numbers(await first.one()) == [[1.0]]
            assert [numbers(await each.one()) for each in asked] == [[[3.0] * width] for width in (1, 2, 3)]

    asyncio.run(main())


def test_ragged_batch_of_an_onnx_model_uses_its_batch_input(tmp_path: Path) -> None:
    (tmp_path / "m" / "1").mkdir(parents=True)
    build_sums(tmp_path / "m" / "1")
    (tmp_path / "m" / "config.pbtxt").write_text("""
        backend: "onnxruntime" max_batch_size: 8
        dynamic_batching { preferred_batch_size: 3 max_queue_delay_microseconds: 30000000 }
        input { name: "X" data_type: TYPE_FP32 dims: [ -1 ] allow_ragged_batch: true }
        output { name: "SUM" data_type: TYPE_FP32 dims: [ 1 ] }
        output { name: "DOUBLE" data_type: TYPE_FP32 dims: [ -1 ] }
        batch_input { kind: BATCH_ACCUMULATED_ELEMENT_COUNT_WITH_ZERO target_name: "BOUNDS"
                      data_type: TYPE_INT32 source_input: "X" }
        batch_output { target_name: "DOUBLE" kind: BATCH_SCATTER_WITH_INPUT_SHAPE source_input: "X" }
    """)

    async def main() -> None:
        async with serving(tmp_path, startup=("m",)) as server:
            asked = [server.ask("m", tensor("X", [[1.0] * width])) for width in (3, 4, 5)]
            answers = [await each.one() for each in asked]
            assert [numbers(each, "SUM") for each in answers] == [[[3.0]], [[4.0]], [[5.0]]]
            assert [numbers(each, "DOUBLE") for each in answers] == [[[2.0] * width] for width in (3, 4, 5)]
            assert server.statistics("m", "")[0].execution_count == 1
            with pytest.raises(Refused, match="expected 1 inputs but got 2"):
                server.ask("m", tensor("X", [[1.0]]), tensor("BOUNDS", [[0, 1]], "int32"))

    asyncio.run(main())


def test_bare_pytorch_export_is_served_with_its_own_signature(tmp_path: Path) -> None:
    class Twice(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x + x

    shapes = ({0: torch.export.Dim("n")},)
    program = torch.export.export(Twice(), (torch.ones(2, 3),), dynamic_shapes=shapes)
    torch.export.save(program, tmp_path / "twice.pt2")

    async def main() -> None:
        async with serving(tmp_path, startup=("twice",)) as server:
            found = server.view("twice", "").config
            assert found.inputs == (TensorSpec("x", Datatype.FP32, (3,)),)
            assert found.outputs == (TensorSpec("OUTPUT__0", Datatype.FP32, (3,)),)
            assert found.max_batch > 1
            response = await server.ask("twice", tensor("x", [[1, 2, 3]])).one()
            assert numbers(response, "OUTPUT__0") == [[2, 4, 6]]

    asyncio.run(main())


def test_large_and_small_tensors_round_trip_unchanged(tmp_path: Path) -> None:
    write(tmp_path, "m", config("dynamic_batching {}"))

    async def main() -> None:
        async with serving(tmp_path, startup=("m",)) as server:
            rng = np.random.default_rng(1)
            given = [
                rng.random((rows, width), dtype=np.float32) for rows, width in ((1, 3), (8, 50_000), (3, 100)) * 5
            ]
            asked = [server.ask("m", tensor("IN", array)) for array in given]
            for array, each in zip(given, asked, strict=True):
                assert numbers(await each.one()) == array.tolist()

    asyncio.run(main())


def test_a_failing_response_callback_does_not_affect_other_requests(tmp_path: Path) -> None:
    write(tmp_path, "m", config("dynamic_batching { max_queue_delay_microseconds: 50000 }", max_batch=2))
    heard: list[str] = []

    def broken(response: InferResponse | None, final: bool) -> None:
        raise LookupError("gone")

    async def main() -> None:
        loop = asyncio.get_running_loop()
        loop.set_exception_handler(lambda _, context: heard.append(str(context["exception"])))
        async with serving(tmp_path, startup=("m",)) as server:
            server.infer(InferRequest("m", "", "", (ONE,)), broken)
            assert await server.numbers("m", ONE) == [[1.0]]
            assert heard == ["gone"]

    asyncio.run(main())
