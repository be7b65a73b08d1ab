"""Endless loads that are aborted, and failures that no longer matter."""

import asyncio
from pathlib import Path

import pytest
from tests.modelserver.models.rig import LOG, PATIENCE_S, Server, config, serving, tensor, until, write

from forebay.core.serving.errors import Refused
from forebay.modelserver.models.options import Options

ONE = tensor("IN", [[1.0]])
BROKEN = """
    def initialize(self, args):
        raise ValueError("no weights here")
"""
FOR_EVER = """
    def initialize(self, args):
        (Path(args["model_repository"]) / "loading").touch()
        while True:
            time.sleep(3600)
"""
ALWAYS_WARMING = """
    def answer(self, request):
        Path(__file__).parent.parent.joinpath("loading").touch()
        return give(get(request))
"""
WARMUP = """
model_warmup {{ name: "endless" batch_size: 1 count: {count}
  inputs {{ key: "IN" value {{ data_type: TYPE_FP32 dims: [1] zero_data: true }} }} }}
"""
ENDLESS = {"initialize": (config(), FOR_EVER), "warm-up": (config(WARMUP.format(count=2**32 - 1)), ALWAYS_WARMING)}


async def _loading(root: Path, server: Server) -> "asyncio.Future[tuple[BaseException | None]]":
    load = asyncio.gather(server.load("slow", {}), return_exceptions=True)
    await until("the load is under way", (root / "slow" / "loading").exists)
    return load


async def _has_failed(load: "asyncio.Future[tuple[BaseException | None]]") -> None:
    (error,) = await load
    assert isinstance(error, Refused)
    assert error.text.startswith("load failed for model 'slow'")


@pytest.mark.parametrize("how", ENDLESS)
def test_unload_aborts_a_load_in_progress(tmp_path: Path, how: str) -> None:
    write(tmp_path, "slow", *ENDLESS[how])

    async def main() -> None:
        async with serving(tmp_path) as server, asyncio.timeout(PATIENCE_S):
            load = await _loading(tmp_path, server)
            await server.unload("slow", False)
            await _has_failed(load)
            assert server.states("slow") == {"1": ("UNAVAILABLE", "unloaded")}
            assert server.ready

    asyncio.run(main())


def test_unload_aborts_loads_that_wait_for_the_one_in_progress(tmp_path: Path) -> None:
    write(tmp_path, "slow", *ENDLESS["initialize"])

    async def main() -> None:
        async with serving(tmp_path) as server, asyncio.timeout(PATIENCE_S):
            loads = [await _loading(tmp_path, server)]
            loads += [asyncio.gather(server.load("slow", {}), return_exceptions=True) for _ in range(2)]
            lock = server.itself._collection.model("slow").lock
            await until("they wait", lambda: len(lock._waiters or ()) == 2)
            await server.unload("slow", False)
            for load in loads:
                await _has_failed(load)
            assert server.states("slow") == {"1": ("UNAVAILABLE", "unloaded")}
            (tmp_path / "slow" / "loading").unlink()
            load = await _loading(tmp_path, server)
            await server.unload("slow", False)
            await _has_failed(load)

    asyncio.run(main())


@pytest.mark.parametrize("how", ENDLESS)
def test_shutdown_aborts_a_load_in_progress(tmp_path: Path, how: str) -> None:
    write(tmp_path, "slow", *ENDLESS[how])

    async def main() -> None:
        async with asyncio.timeout(PATIENCE_S):
            async with serving(tmp_path) as server:
                load = await _loading(tmp_path, server)
            await _has_failed(load)

    asyncio.run(main())


def test_stop_during_startup_aborts_all_loads(tmp_path: Path) -> None:
    for name in ("a", "b", "slow"):
        write(tmp_path, name, config(), FOR_EVER)

    async def main() -> None:
        server = Server(Options(repositories=(tmp_path,), loads_max=1), LOG)
        async with asyncio.timeout(PATIENCE_S), asyncio.TaskGroup() as tasks:
            tasks.create_task(server.run())
            await until("the first one loads", (tmp_path / "a" / "loading").exists)
            server.stop()
            assert len(await server.started()) == 3
        assert not (tmp_path / "b" / "loading").exists()

    asyncio.run(main())


def test_unloading_a_failed_model_restores_server_readiness(tmp_path: Path) -> None:
    write(tmp_path, "bad", config(), BROKEN)
    write(tmp_path, "good", config())

    async def main() -> None:
        async with serving(tmp_path, startup=("good",)) as server:
            with pytest.raises(Refused, match="no weights here"):
                await server.load("bad", {})
            assert not server.ready
            await server.unload("bad", False)
            assert server.ready
            assert server.states("bad") == {"1": ("UNAVAILABLE", "unloaded")}
            assert await server.numbers("good", ONE) == [[1.0]]

    asyncio.run(main())


def test_concurrent_load_failures_each_report_their_own_reason(tmp_path: Path) -> None:
    names = [f"m-{number}" for number in range(6)]
    for name in names:
        write(tmp_path, name, config(), BROKEN.replace("no weights here", f"no weights for {name}"))

    async def main() -> None:
        async with serving(tmp_path, loads_max=len(names)) as server, asyncio.timeout(PATIENCE_S):
            errors = await asyncio.gather(*(server.load(name, {}) for name in names), return_exceptions=True)
            for name, error in zip(names, errors, strict=True):
                assert isinstance(error, Refused)
                assert f"no weights for {name}" in error.text

    asyncio.run(main())
