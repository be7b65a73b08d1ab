"""Changes of the number of instances that fail or are aborted, and what a shortage of descriptors leaves."""

import asyncio
import json
import resource
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest
from tests.contract.tensor import models
from tests.modelserver.models.rig import PATIENCE_S, SAME, config, numbers, serving, tensor, until, write
from tests.modelserver.process.rig import answers, spec, started, values, work

from forebay.core.serving.config import Datatype
from forebay.core.serving.errors import Refused
from forebay.modelserver.models.options import Control
from forebay.modelserver.repository import Described

ONE = tensor("IN", [[1.0]])
GROUP = "instance_group {{ count: {} kind: KIND_CPU }}\n"
SECOND_HANGS = """
    def initialize(self, args):
        folder = Path(args["model_repository"]).parent  # files of the model itself stay as they are
        if (folder / "first").exists():
            (folder / "second").touch()
            while True:
                time.sleep(3600)
        (folder / "first").touch()
"""
LONG = """
    def answer(self, request):
        (Path(__file__).parents[2] / "running").touch()
        while True:
            time.sleep(3600)
"""


@contextmanager
def no_descriptors() -> Iterator[None]:
    """This process cannot open anything."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (0, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def _with_three(described: Described) -> Described:
    groups = (replace(described.config.instances[0], count=3),)
    return replace(described, config=replace(described.config, instances=groups))


@pytest.mark.parametrize("how", ["unload", "stop"])
def test_added_instance_that_hangs_keeps_nothing_from_ending(tmp_path: Path, how: str) -> None:
    write(tmp_path, "m", config(GROUP.format(1)), SECOND_HANGS + SAME)

    async def main() -> None:
        async with asyncio.timeout(PATIENCE_S), serving(tmp_path, startup=("m",)) as server:
            (tmp_path / "m/config.pbtxt").write_text(config(GROUP.format(2)))
            load = asyncio.gather(server.load("m", {}), return_exceptions=True)
            await until("the second one hangs", (tmp_path / "second").exists)
            assert await server.numbers("m", ONE) == [[1.0]]
            if how == "unload":
                await server.unload("m", False)
            else:
                server.stop()
            (error,) = await load
            assert isinstance(error, Refused)

    asyncio.run(main())


def test_removed_instance_with_a_long_batch_does_not_keep_a_server_from_stopping(tmp_path: Path) -> None:
    write(tmp_path, "m", config(GROUP.format(2)), LONG)

    async def main() -> None:
        async with asyncio.timeout(PATIENCE_S), serving(tmp_path, startup=("m",), drain_s=0.2) as server:
            asked = [server.ask("m", ONE) for _ in range(2)]
            await until("a batch runs", (tmp_path / "running").exists)
            (tmp_path / "m/config.pbtxt").write_text(config(GROUP.format(1)))
            load = asyncio.gather(server.load("m", {}), return_exceptions=True)
            model = server.itself._collection.model("m")
            await until("it is being removed", lambda: model._adopting)
            server.stop(drained=True)
            await load
        assert [(await each.one()).error is not None for each in asked] == [True, True]

    asyncio.run(main())


def test_failed_reload_leaves_instances_and_configuration_as_they_were(tmp_path: Path) -> None:
    only = "version_policy { specific { versions: [1] } }\n"
    write(tmp_path, "m", config(GROUP.format(1) + only))
    (tmp_path / "m/2").mkdir()
    (tmp_path / "m/2/model.py").write_text("raise RuntimeError('broken')")

    async def main() -> None:
        async with serving(tmp_path, startup=("m",)) as server:
            (pid,) = server.pids("m")
            before = server.view("m", "").document
            more = json.loads(json.dumps(before)) | {"version_policy": {"all": {}}}
            more["instance_group"] = [{"count": 3, "kind": "KIND_CPU"}]
            with pytest.raises(Refused, match="broken"):
                await server.load("m", {"config": json.dumps(more)})
            assert server.pids("m") == [pid]
            assert server.view("m", "").document == before
            await server.load("m", {})
            assert server.pids("m") == [pid]
            assert await server.numbers("m", ONE) == [[1.0]]

    asyncio.run(main())


def test_instances_that_cannot_be_added_without_descriptors_are_added_later(tmp_path: Path) -> None:
    models.build("onnxruntime", "identity", Datatype.FP32, tmp_path / "o/1")
    text = 'backend: "onnxruntime"\nmax_batch_size: 8\n' + GROUP
    (tmp_path / "o/config.pbtxt").write_text(text.format(1))
    x = tensor("X", [[1.0] * 4])

    async def main() -> None:
        async with serving(tmp_path, control=Control.POLL, poll_s=0.02) as server:
            assert numbers(await server.ask("o", x).one(), "Y") == [[1.0] * 4]
            collection = server.itself._collection
            described = collection.model("o").described
            with no_descriptors(), pytest.raises(Refused, match="no channel for an instance"):
                await collection.find("o", -1).adopt(_with_three(described))
            (tmp_path / "o/config.pbtxt").write_text(text.format(3))
            await until("three instances", lambda: server.view("o", "").config.instance_count == 3)
            assert numbers(await server.ask("o", x).one(), "Y") == [[1.0] * 4]

    asyncio.run(main())


def test_process_that_is_ready_while_there_are_no_descriptors_is_replaced(tmp_path: Path) -> None:
    async def scene() -> None:
        async with started(spec(tmp_path), ready=False) as process:
            await until("it is starting", lambda: process.pids)
            with no_descriptors():
                await until("it has loaded", lambda: process.loaded is not None)
            await process.wait_ready()
            assert [values(each) for each in await answers(process, work(data=[3]))] == [[3]]

    asyncio.run(scene())
