"""Repositories that change while the server runs: what is loaded, and what the index shows."""

import asyncio
import json
import os
import shutil
import tempfile
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import structlog
from tests.modelserver.models.rig import IO, PATIENCE_S, config, ensemble, serving, tensor, until, write

from forebay.core.serving.errors import Refused
from forebay.modelserver.models.life.memory import guessed_bytes
from forebay.modelserver.models.life.stamps import stamps
from forebay.modelserver.models.options import Control
from forebay.modelserver.repository import Found, named, read, scan

pytestmark = pytest.mark.slow
ONE = tensor("IN", [[1.0]])
TWO = """
    def answer(self, request):
        return give(get(request) * 0 + 2)
"""


@pytest.fixture
def always_scanned(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("forebay.modelserver.models.life.collection.INDEX_FRESH_S", 0)


@pytest.mark.interpreted
def test_poll_mode_misses_no_change_that_the_index_has_seen_first(always_scanned: None, tmp_path: Path) -> None:
    write(tmp_path, "m", config())

    async def main() -> None:
        async with serving(tmp_path, control=Control.POLL, poll_s=0.2) as server:
            old = server.pids("m")
            write(tmp_path, "n", config(), TWO)
            write(tmp_path, "m", config(), TWO)
            await server.refresh()
            assert "n" in {entry.name for entry in server.index(False)}
            await until("added", lambda: server.states("n").get("1") == ("READY", ""))
            await until("changed", lambda: server.pids("m") != old)
            assert await server.numbers("m", ONE) == [[2.0]]

    asyncio.run(main())


@pytest.mark.interpreted
def test_configuration_put_beside_the_models_does_not_end_the_server(always_scanned: None, tmp_path: Path) -> None:
    write(tmp_path, "m", config())

    async def main() -> None:
        log = structlog.testing.CapturingLogger()
        options = {"control": Control.POLL, "poll_s": 0.05, "log": structlog.wrap_logger(log, processors=[])}
        async with serving(tmp_path, **options) as server:
            shutil.copy(tmp_path / "m/config.pbtxt", tmp_path)
            await until("noticed", lambda: "repository cannot be read" in str(log.calls))
            await server.refresh()
            assert server.states("m") == {"1": ("READY", "")}
            (tmp_path / "config.pbtxt").unlink()
            write(tmp_path, "n", config())
            await until("added", lambda: server.states("n").get("1") == ("READY", ""))

    asyncio.run(main())


def test_files_that_disappear_while_they_are_looked_at_are_no_error(tmp_path: Path) -> None:
    write(tmp_path, "m", config())
    (found,) = scan(tmp_path)
    described = read(found)
    before, size = stamps(found, described), guessed_bytes(tmp_path / "m/1")
    (tmp_path / "m/1/.model.part").symlink_to(tmp_path / "renamed meanwhile")
    assert stamps(found, described) != before
    assert guessed_bytes(tmp_path / "m/1") == size


def test_file_name_that_is_not_utf_8_is_no_error(tmp_path: Path) -> None:
    write(tmp_path, "m", config())
    (tmp_path / "m/1" / os.fsdecode(b"l\xf6sung.txt")).touch()
    (found,) = scan(tmp_path)
    assert stamps(found, read(found)).keys() == {1}


@pytest.mark.interpreted
@pytest.mark.parametrize("control", [Control.EXPLICIT, Control.POLL])
def test_index_omits_unloaded_models_whose_folder_is_gone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, control: Control
) -> None:
    monkeypatch.setattr("forebay.modelserver.models.life.collection.INDEX_FRESH_S", 0)
    write(tmp_path, "m", config())

    async def main() -> None:
        async with serving(tmp_path, control=control, startup=("m",), poll_s=0.02) as server:
            shutil.rmtree(tmp_path / "m")
            if control is Control.EXPLICIT:
                assert server.states("m") == {"1": ("READY", "")}
                await server.unload("m", False)
                await server.refresh()
            await until("gone", lambda: server.states("m") == {})
            with pytest.raises(Refused, match="Request for unknown model: 'm' has no available versions"):
                server.ask("m", ONE)
            write(tmp_path, "m", config())
            if control is Control.EXPLICIT:
                await server.refresh()
                assert server.states("m") == {"1": ("UNAVAILABLE", "unloaded")}
                await server.load("m", {})
            await until("back", lambda: server.states("m") == {"1": ("READY", "")})

    asyncio.run(main())


@pytest.mark.interpreted
def test_repositories_are_scanned_for_the_index_outside_the_event_loop(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(tmp_path, "m", config())
    scans: list[int] = []

    def noted(*folders: Path, linked: Sequence[Path]) -> list[Found]:
        scans.append(threading.get_ident())
        return scan(*folders, linked=linked)

    monkeypatch.setattr("forebay.modelserver.models.life.collection.scan", noted)

    async def main() -> None:
        async with serving(tmp_path) as server:
            await server.refresh()  # the scan of the start is recent
            server.index(False)
            assert len(scans) == 1
            write(tmp_path, "n", config())
            monkeypatch.setattr("forebay.modelserver.models.life.collection.INDEX_FRESH_S", 0)
            await server.refresh()
            assert [entry.name for entry in server.index(False)] == ["m", "n"]
            assert len(scans) == 2
            assert threading.get_ident() not in scans

    asyncio.run(main())


@pytest.mark.interpreted
def test_scan_that_a_later_one_has_overtaken_is_ignored(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("forebay.modelserver.models.life.collection.INDEX_FRESH_S", 0)
    write(tmp_path, "m", config())
    scanned, go_on = threading.Event(), threading.Event()

    def slow(*folders: Path, linked: Sequence[Path]) -> list[Found]:
        found = scan(*folders, linked=linked)
        scanned.set()
        go_on.wait(PATIENCE_S)
        return found

    async def main() -> None:
        async with serving(tmp_path) as server:
            monkeypatch.setattr("forebay.modelserver.models.life.collection.scan", slow)
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(server.refresh())
                await until("the first has seen m", scanned.is_set)
                monkeypatch.setattr("forebay.modelserver.models.life.collection.scan", scan)
                write(tmp_path, "n", config())
                await server.load("m", {})
                go_on.set()
            assert [entry.name for entry in server.index(False)] == ["m", "n"]

    asyncio.run(main())


SHARED = """
    def initialize(self, args):
        self.factor = float((Path(args["model_repository"]) / "shared/factor").read_text())

    def answer(self, request):
        return give(get(request) * self.factor)
"""


def test_changed_file_beside_the_versions_reloads_them(tmp_path: Path) -> None:
    write(tmp_path, "m", config(), SHARED)
    factor = tmp_path / "m/shared/factor"
    factor.parent.mkdir()
    factor.write_text("2")

    async def main() -> None:
        async with serving(tmp_path, startup=("m",)) as server:
            assert await server.numbers("m", ONE) == [[2.0]]
            factor.write_text("30")
            await server.load("m", {})
            assert await server.numbers("m", ONE) == [[30.0]]
            pids = server.pids("m")
            write(tmp_path, "m", config("instance_group { count: 2 kind: KIND_CPU }"), versions=())
            await server.load("m", {})
            assert set(pids) < set(server.pids("m"))

    asyncio.run(main())


TAGGED = """
    def initialize(self, args):
        import json
        self.tag = float(json.loads(args["model_config"])["metric_tags"]["tag"])

    def answer(self, request):
        return give(get(request) * self.tag)
"""


def test_every_changed_field_of_the_configuration_is_applied(tmp_path: Path) -> None:
    write(tmp_path, "m", config('metric_tags { key: "tag" value: "2" }'), TAGGED, (1, 2))

    async def main() -> None:
        async with serving(tmp_path, startup=("m",)) as server:
            assert await server.numbers("m", ONE) == [[2.0]]
            document = dict(server.view("m", "").document)
            await server.load("m", {"config": json.dumps({**document, "metric_tags": {"tag": "30"}})})
            assert await server.numbers("m", ONE) == [[30.0]]
            write(
                tmp_path, "m", config('metric_tags { key: "tag" value: "30" } version_policy { all {} }'), versions=()
            )
            pids = server.pids("m", 2)
            await server.load("m", {})
            assert [server.view("m", each).document["version_policy"] for each in "12"] == [{"all": {}}] * 2
            assert server.pids("m", 2) == pids

    asyncio.run(main())


def test_ensemble_keeps_its_overridden_configuration_when_a_step_is_reloaded(tmp_path: Path) -> None:
    write(tmp_path, "m", config(dims="1"))
    form = f"max_batch_size: 8 {IO.format(dims='1')}"
    ensemble(tmp_path, "e", [("m", {"IN": "IN"}, {"OUT": "OUT"})], form)

    async def main() -> None:
        async with serving(tmp_path, startup=("e",)) as server:
            document = dict(server.view("e", "").document)
            await server.load("e", {"config": json.dumps({**document, "max_batch_size": 3})})
            assert server.view("e", "").config.max_batch == 3
            write(tmp_path, "m", config(dims="1"), TWO)
            await server.load("m", {})
            assert await server.numbers("e", ONE) == [[2.0]]
            assert server.view("e", "").config.max_batch == 3
            await server.load("e", {})
            assert server.view("e", "").config.max_batch == 8

    asyncio.run(main())


def test_load_of_an_unchanged_model_does_not_rebuild_its_ensembles(tmp_path: Path) -> None:
    write(tmp_path, "m", config(dims="1"))
    ensemble(tmp_path, "e", [("m", {"IN": "IN"}, {"OUT": "OUT"})], f"max_batch_size: 8 {IO.format(dims='1')}")

    async def main() -> None:
        async with serving(tmp_path, startup=("e",)) as server:
            write(tmp_path, "m", config(dims="1"), TWO, (2,))
            await server.load("m", {})
            assert await server.numbers("e", ONE) == [[2.0]]
            await server.load("m", {})
            assert server.statistics("e", "")[0].success.count == 1
            await server.unload("m", False, "2")
            await server.load("m", {})
            assert await server.numbers("e", ONE) == [[2.0]]

    asyncio.run(main())


def test_model_keeps_its_overridden_configuration_when_an_ensemble_of_it_is_loaded(tmp_path: Path) -> None:
    write(tmp_path, "m", config(dims="1"))
    form = f"max_batch_size: 3 {IO.format(dims='1')}"
    ensemble(tmp_path, "e", [("m", {"IN": "IN"}, {"OUT": "OUT"})], form)

    async def main() -> None:
        async with serving(tmp_path, startup=("m",)) as server:
            document = dict(server.view("m", "").document)
            await server.load("m", {"config": json.dumps({**document, "max_batch_size": 3})})
            pids = server.pids("m")
            await server.load("e", {})
            assert server.view("m", "").config.max_batch == 3
            assert server.pids("m") == pids

    asyncio.run(main())


def test_files_of_a_load_request_for_which_there_is_no_folder_are_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "none"))
    with pytest.raises(Refused, match="there is no folder for its files: No such file or directory"):
        read(named("m"), "{}", {"file:1/model.py": b""})


def test_instances_that_are_added_while_others_wait_for_their_sequences_stay(tmp_path: Path) -> None:
    gate, root = tmp_path / "gate", tmp_path / "r"
    source = f"""
    def initialize(self, args):
        while Path({str(gate)!r}).exists():
            time.sleep(0.001)
    def answer(self, request):
        return give(get(request))
"""

    def counted(count: int) -> str:
        sequences = "sequence_batching { max_sequence_idle_microseconds: 60000000 }"
        return config(f"{sequences} instance_group {{ count: {count} kind: KIND_CPU }}", max_batch=1)

    write(root, "m", counted(2), source)

    async def main() -> None:
        async with serving(root, startup=("m",)) as server:
            for number in (1, 2):
                await server.numbers("m", ONE, sequence_id=number, sequence_start=True)
            write(root, "m", counted(1), versions=())
            await server.load("m", {})
            write(root, "m", counted(3), versions=())
            gate.touch()
            load = asyncio.gather(server.load("m", {}))
            await until("the third is being loaded", lambda: len(server.pids("m")) == 3)
            for number in (1, 2):
                await server.numbers("m", ONE, sequence_id=number, sequence_end=True)
            version: Any = server.itself._collection.find("m", -1)
            await until("those that leave have no sequences", lambda: not version._runner.waiting)
            await asyncio.gather(version._runner.left())
            gate.unlink()
            await load
            await version.process.resized()
            assert len(server.pids("m")) == 3
            started = [server.ask("m", ONE, sequence_id=number, sequence_start=True) for number in (3, 4, 5)]
            for each in started:
                await each.one()

    asyncio.run(main())
