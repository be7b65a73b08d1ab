"""Warmup requests that run before a model is ready."""

import asyncio
import re
from pathlib import Path

import pytest
from tests.modelserver.models.rig import SAME, config, serving, tensor, until, write

from forebay.core.serving.errors import Refused

pytestmark = pytest.mark.slow
WARM = """
    model_warmup {{ name: "w" {size} inputs {{ key: "{key}" value {{ data_type: {kind} zero_data: true {dims} }} }} }}
"""


def test_warmups_run_before_ready_and_are_not_counted(tmp_path: Path) -> None:
    seen = tmp_path / "seen"
    note = f"""
    def execute(self, requests):
        Path({str(seen)!r}).open("a").write(f"{{len(requests)}}:{{get(requests[0]).tolist()}} ")
        return [give(get(request)) for request in requests]
"""
    warmups = """
        model_warmup { name: "zeros" batch_size: 2 count: 2
            inputs { key: "IN" value { data_type: TYPE_FP32 dims: [2] zero_data: true } } }
        model_warmup { name: "file" batch_size: 1
            inputs { key: "IN" value { data_type: TYPE_FP32 dims: [1] input_data_file: "three" } } }
    """
    root = write(tmp_path / "r", "m", config(warmups), note)
    (root / "m" / "warmup").mkdir()
    (root / "m" / "warmup" / "three").write_bytes(bytes(tensor("IN", [3.0]).data))
    write(root, "bad", config(warmups), "    def answer(self, request):\n        raise ValueError('cold')\n")
    (root / "bad" / "warmup").mkdir()
    (root / "bad" / "warmup" / "three").write_bytes(b"short")

    async def main() -> None:
        async with serving(root, startup=("m",)) as server:
            assert seen.read_text() == "2:[[0.0, 0.0]] 2:[[0.0, 0.0]] 1:[[3.0]] "
            assert server.statistics("m", "")[0].execution_count == 0
            with pytest.raises(Refused, match=r"failed to run warmup sample 'zeros'.*cold"):
                await server.load("bad", {})
            write(root, "bad", config(warmups), SAME)
            (root / "bad" / "warmup" / "three").write_bytes(b"abc")
            with pytest.raises(Refused, match=r"expects 4 bytes, but .* from three only has 3 bytes"):
                await server.load("bad", {})

    asyncio.run(main())


@pytest.mark.parametrize(
    ("more", "text"),
    [
        ({"kind": "TYPE_INT32"}, "inference input 'IN' data-type is 'INT32', but model 'm' expects 'FP32'"),
        ({"key": "I"}, "unexpected inference input 'I' for model 'm'"),
        ({"dims": "dims: [1, 2]"}, "unexpected shape for input 'IN' for model 'm'. Expected [-1,-1], got [1,1,2]."),
        ({"dims": "dims: [100000000000]"}, "input 'IN' has 400000000000 bytes; at most 1073741824"),
    ],
)
def test_invalid_warmup_fails_the_load(tmp_path: Path, more: dict[str, str], text: str) -> None:
    plain = {"size": "batch_size: 1", "key": "IN", "kind": "TYPE_FP32", "dims": "dims: [1]"}
    write(tmp_path, "m", config(WARM.format(**plain) + WARM.format(**{**plain, **more})), SAME)

    async def main() -> None:
        async with serving(tmp_path) as server:
            with pytest.raises(Refused, match=re.escape(f"warmup sample 'w': {text}")):
                await server.load("m", {})

    asyncio.run(main())


def test_warmup_of_a_model_that_does_not_batch_has_one_request_at_a_time(tmp_path: Path) -> None:
    warm = WARM.format(size="batch_size: 2", key="IN", kind="TYPE_FP32", dims="dims: [1]")
    write(tmp_path, "m", config(warm, max_batch=0), SAME)

    async def main() -> None:
        async with serving(tmp_path) as server:
            with pytest.raises(Refused, match="warmup sample 'w': batch size 2 for 'm', max allowed is 1"):
                await server.load("m", {})

    asyncio.run(main())


def test_warmup_input_is_reshaped_and_can_include_controls(tmp_path: Path) -> None:
    source = """
    def answer(self, request):
        assert get(request).shape == (1, 4), get(request).shape
        assert get(request, "READY").shape == (1, 1)
        return give(get(request))
"""
    text = """
        sequence_batching { control_input { name: "READY"
            control { kind: CONTROL_SEQUENCE_READY int32_false_true: [0, 1] } } }
        model_warmup { name: "w" batch_size: 1
            inputs { key: "IN" value { data_type: TYPE_FP32 dims: [2, 2] zero_data: true } }
            inputs { key: "READY" value { data_type: TYPE_INT32 dims: [1] random_data: true } } }
    """
    reshaped = config(text, dims="4").replace("dims: [4]", "dims: [2, 2] reshape { shape: [4] }", 1)
    write(tmp_path, "m", reshaped, source)

    async def main() -> None:
        async with serving(tmp_path, startup=("m",)) as server:
            assert server.states("m") == {"1": ("READY", "")}

    asyncio.run(main())


def test_warmup_without_batch_size_is_skipped(tmp_path: Path) -> None:
    sample = WARM.format(size="", key="NOBODY", kind="TYPE_FP32", dims="dims: [1]")
    write(tmp_path, "m", config(sample), "    def answer(self, request):\n        raise ValueError('cold')\n")

    async def main() -> None:
        async with serving(tmp_path, startup=("m",)) as server:
            assert server.states("m") == {"1": ("READY", "")}

    asyncio.run(main())


def test_added_instances_are_warmed_up_before_they_get_requests(tmp_path: Path) -> None:
    seen, cold = tmp_path / "seen", tmp_path / "cold"
    note = f"""
    def answer(self, request):
        if get(request)[0, 0] == 0:
            with Path({str(seen)!r}).open("a") as file:
                file.write(f"{{os.getpid()}} ")
            assert not Path({str(cold)!r}).exists(), "cold"
        return give(get(request))
"""
    warm = WARM.format(size="batch_size: 1", key="IN", kind="TYPE_FP32", dims="dims: [1]")
    root = write(tmp_path / "r", "m", config(warm), note)

    def scale(count: int) -> None:
        (root / "m" / "config.pbtxt").write_text(config(f"{warm} instance_group {{ count: {count} kind: KIND_CPU }}"))

    async def main() -> None:
        async with serving(root, startup=("m",)) as server:
            scale(3)
            await server.load("m", {})
            assert seen.read_text().split() == [str(pid) for pid in server.pids("m")]
            cold.touch()
            scale(4)
            with pytest.raises(Refused, match=r"failed to run warmup sample 'w'.*cold"):
                await server.load("m", {})
            await until("the cold one is gone", lambda: len(server.pids("m")) == 3)
            assert await server.numbers("m", tensor("IN", [[1.0]])) == [[1.0]]
            assert server.states("m") == {"1": ("READY", "")}

    asyncio.run(main())
