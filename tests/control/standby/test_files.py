"""Caching model files in memory: all files of a model or none, and never more than fits."""

import asyncio
from dataclasses import replace
from pathlib import Path

import pytest
from tests.control.deploying.rig import play
from tests.control.deploying.world import World, artifact, wait

from forebay.control.plan import Plan, make_plan
from forebay.control.standby.files import available_bytes, files_of, in_memory, read_ahead
from forebay.control.standby.standby import KEEP_EVERY_S, Standby
from forebay.core.cluster import Cluster
from forebay.obs.metrics import Metrics

MB = 1_000_000


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "deep").mkdir()
    (tmp_path / "deep" / "a.bin").write_bytes(bytes(2 * MB))
    (tmp_path / "b.gguf").write_bytes(bytes(MB))
    return tmp_path


def test_files_are_cached_up_to_half_of_available_memory(folder: Path) -> None:
    wanted = {"whole": folder, "one": folder / "b.gguf", "none": folder / "synthetic"}
    assert files_of(folder) == [folder / "b.gguf", folder / "deep" / "a.bin"]
    assert read_ahead(wanted, 100 * MB) == {
        "none": "its 0 MB are cached in memory",
        "one": "its 1 MB are cached in memory",
        "whole": "its 3 MB are cached in memory",
    }
    assert read_ahead(wanted, 4 * MB)["whole"] == "its 3 MB are not cached in memory: there is room for 1 MB"


def test_available_bytes_comes_from_meminfo(tmp_path: Path) -> None:
    assert available_bytes() > 0
    (tmp_path / "meminfo").write_text("MemTotal: 9 kB\nMemAvailable:   2048 kB\n")
    assert available_bytes(tmp_path / "meminfo") == 2 * 1024 * 1024
    (tmp_path / "meminfo").write_text("MemTotal: 9 kB\n")
    assert available_bytes(tmp_path / "meminfo") == 0


def plan(world: World, source: Path) -> Plan:
    models = [
        {"name": name, "task": "chat", "source": "x", "engine": "synthetic", "cached": name != "plain"}
        for name in ("big", "plain")
    ]
    found = replace(artifact("old"), path=source)
    cluster = Cluster.model_validate({"models": models})
    return make_plan(cluster, {"big": found, "plain": found}, world.places, "0")


def test_only_models_with_cached_enabled_are_cached(folder: Path) -> None:
    async def test(world: World) -> None:
        wanted = plan(world, folder)
        assert await in_memory(replace(wanted, models=wanted.models[1:])) == {}

    play(folder, test)
    wanted = plan(World(folder, None), folder)  # type: ignore[arg-type]
    assert asyncio.run(in_memory(wanted)) == {"big": "its 3 MB are cached in memory"}


def test_caching_is_reported_on_change_and_survives_errors(folder: Path) -> None:
    answers: list[dict[str, str] | OSError] = [{"a": "kept"}, {"a": "kept"}, OSError("gone"), {"a": "no room"}]
    said = list[tuple[str, str]]()

    async def keep(plan: Plan) -> dict[str, str]:
        answer = answers.pop(0)
        if isinstance(answer, OSError):
            raise answer
        return answer

    async def test(world: World) -> None:
        wanted = world.plan()
        pools = Standby(Metrics(), lambda kind, why: said.append((kind, why)), keep=keep)
        async with asyncio.TaskGroup() as tasks:
            keeping = tasks.create_task(pools.run(lambda: wanted))
            await wait(3.5 * KEEP_EVERY_S)
            keeping.cancel()
        await Standby(Metrics(), lambda kind, why: None).run(lambda: wanted)

    play(folder, test)
    assert said == [("cached", "a: kept"), ("trouble", "cached: gone"), ("cached", "a: no room")]
