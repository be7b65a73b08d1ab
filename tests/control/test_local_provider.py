"""What only processes can do: outlive their provider, share pids, fill disks."""

import asyncio
import json
import os
import signal
import subprocess
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path

import pytest
from tests.control.units import STAND_IN, kill_all, local, replica, seen, wait_for

from forebay.gateway.records.accesslog import AccessLog
from forebay.gateway.records.lines import Line
from forebay.obs import log
from forebay.providers import local as local_module
from forebay.providers.local import LAST_WORDS_BYTES_READ, LocalProvider, clean_env
from forebay.providers.processes import Identity, describe, identify, is_alive, kill


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Path]:
    yield tmp_path
    kill_all(tmp_path)


def run(folder: Path, *lives: Callable[[LocalProvider], Awaitable[None]]) -> None:
    """Every life gets a provider of its own on the same folder, as after a restart of control."""

    async def all_lives() -> None:
        for life in lives:
            provider = local(folder)
            try:
                await asyncio.wait_for(life(provider), 30)
            finally:
                provider.close()

    asyncio.run(all_lives())


async def _place_one(provider: LocalProvider) -> None:
    await provider.place(replica(), 1)
    await wait_for(provider, "chat-0", lambda u: u.endpoint)


def test_new_provider_adopts_units_and_notices_their_end(folder: Path) -> None:
    async def second(provider: LocalProvider) -> None:
        unit = await seen(provider, "chat-0")
        assert unit
        assert unit.alive
        assert unit.endpoint
        os.kill(unit.pid, signal.SIGKILL)
        async with asyncio.timeout(15):
            await provider.changed()
        await wait_for(provider, "chat-0", lambda u: not u.alive)

    run(folder, _place_one, second)


DEEP = '{"prompt": ' + "[" * 1500


def test_last_output_of_a_killed_unit_is_its_errors_and_plain_lines(folder: Path) -> None:
    async def second(provider: LocalProvider) -> None:
        with (folder / "units" / "chat-0.g1" / "log").open("w") as file:
            logger = log.configure(file, process="worker")
            file.write("started\n")
            for _ in range(10):
                logger.info("long ago", text="x" * (LAST_WORDS_BYTES_READ // 10))
            logger.error("engine ended", reason="no memory")
            logger.warning("slow")
            file.write("Traceback\n{not json}\n" + DEEP + "\n")
            logger.info("listening")
        unit = await seen(provider, "chat-0")
        assert unit
        os.kill(unit.pid, signal.SIGKILL)
        unit = await wait_for(provider, "chat-0", lambda u: not u.alive)
        error, *printed = unit.last_words.splitlines()
        assert json.loads(error)["reason"] == "no memory"
        assert printed == ["Traceback", "{not json}", DEEP]

    run(folder, _place_one, second)


def test_access_log_lines_are_not_last_output(folder: Path) -> None:
    async def second(provider: LocalProvider) -> None:
        with (folder / "units" / "chat-0.g1" / "log").open("wb") as file:
            access = AccessLog(file)
            access._dropped = 3
            for code, status in (("ok", 200), ("replica_lost", 502)):
                access.add(Line("request", 1.0, "req-1", "/v1/completions", "chat", status, code, 5))
            access.flush()
            file.write(b'{"event":"crashed"}\n')
        unit = await seen(provider, "chat-0")
        assert unit
        os.kill(unit.pid, signal.SIGKILL)
        unit = await wait_for(provider, "chat-0", lambda u: not u.alive)
        assert unit.last_words == '{"event":"crashed"}'

    run(folder, _place_one, second)


def test_reused_pid_is_neither_adopted_nor_killed(folder: Path) -> None:
    async def second(provider: LocalProvider) -> None:
        record = folder / "units" / "chat-0.g1" / "record.json"
        stranger = identify(os.getpid())
        assert stranger
        record.write_text(json.dumps({"pid": os.getpid(), "ticks": stranger.ticks - 1, "boot": stranger.boot}))
        unit = await seen(provider, "chat-0")
        assert unit
        assert not unit.alive
        await provider.remove("chat-0", 1, 0.0)
        assert await seen(provider, "chat-0") is None

    run(folder, _place_one, second)


@pytest.mark.parametrize("writable", [True, False])
def test_unit_without_a_record_of_its_process_is_adopted(writable: bool, folder: Path) -> None:
    pids = []

    async def first(provider: LocalProvider) -> None:
        await _place_one(provider)
        unit = await seen(provider, "chat-0")
        assert unit
        pids.append(unit.pid)
        (folder / "units" / "chat-0.g1" / "record.json").unlink()
        if not writable:
            (folder / "units" / "chat-0.g1" / "record.tmp").mkdir()

    async def second(provider: LocalProvider) -> None:
        unit = await seen(provider, "chat-0")
        assert unit
        assert (unit.alive, unit.pid) == (True, pids[0])

    run(folder, first, second, second)


def test_unit_whose_provider_died_before_starting_it_is_dead(folder: Path) -> None:
    async def first(provider: LocalProvider) -> None:
        await _place_one(provider)
        (folder / "units" / "chat-0.g1" / "record.json").unlink()
        await provider.remove("chat-0", 1, 0.0)
        await wait_for(provider, "chat-0", lambda u: not u.alive)

    async def second(provider: LocalProvider) -> None:
        unit = await seen(provider, "chat-0")
        assert unit
        assert not unit.alive
        assert "never started" in unit.ended

    run(folder, first, second)


def test_process_without_its_folder_is_killed_at_the_next_start(folder: Path) -> None:
    lost = folder / "units" / "chat-0.g9" / "spec.json"
    lost.parent.mkdir(parents=True)
    lost.write_text(json.dumps({"host": "127.0.0.1", "endpoint_path": str(lost.parent / "e"), "generation": 9}))
    process = subprocess.Popen([*STAND_IN, str(lost)], start_new_session=True, stdout=subprocess.PIPE)
    assert process.stdout
    with process.stdout:
        assert b"started" in process.stdout.readline()

    async def life(provider: LocalProvider) -> None:
        assert await provider.observe() == ()

    run(folder, life)
    assert process.wait(15) == -signal.SIGKILL
    assert not lost.parent.exists()


def test_incomplete_and_damaged_folders_are_removed(folder: Path) -> None:
    for name in (".draft", "chat-0.g1", "chat-0.g2"):
        (folder / "units" / name).mkdir(parents=True)
    (folder / "units" / "chat-0.g2" / "unit.json").write_text("{")

    async def life(provider: LocalProvider) -> None:
        assert await provider.observe() == ()

    run(folder, life)
    assert list((folder / "units").iterdir()) == []


def test_last_log_of_a_slot_is_kept_after_removal(folder: Path) -> None:
    async def life(provider: LocalProvider) -> None:
        await provider.place(replica(behave="dies"), 1)
        await wait_for(provider, "chat-0", lambda u: not u.alive)
        await provider.remove("chat-0", 1, 0.0)

    run(folder, life)
    assert "the moon is full" in (folder / "logs" / "chat-0.log").read_text()
    assert list((folder / "units").iterdir()) == []


def test_oversized_log_is_truncated_and_its_tail_kept(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(local_module, "LOG_BYTES_MAX", 1000)
    monkeypatch.setattr(local_module, "LOG_BYTES_KEPT", 100)

    async def life(provider: LocalProvider) -> None:
        await _place_one(provider)
        log = folder / "units" / "chat-0.g1" / "log"
        with log.open("ab") as file:
            file.write(b"x" * 5000 + b"the end")
        await provider.observe()
        assert log.stat().st_size == 0
        kept = (log.with_name("log.old")).read_bytes()
        assert len(kept) == 100
        assert kept.endswith(b"the end")

    run(folder, life)


def test_an_oversized_log_is_truncated_even_if_its_tail_cannot_be_written(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(local_module, "LOG_BYTES_MAX", 1000)
    monkeypatch.setattr(local_module, "LOG_BYTES_KEPT", 100)

    async def life(provider: LocalProvider) -> None:
        await _place_one(provider)
        log = folder / "units" / "chat-0.g1" / "log"
        log.with_name("log.old").mkdir()  # like a full disk
        with log.open("ab") as file:
            file.write(b"x" * 5000)
        unit = await seen(provider, "chat-0")
        assert unit
        assert unit.alive
        assert log.stat().st_size == 0

    run(folder, life)


def test_units_inherit_no_forebay_settings_or_secrets() -> None:
    environ = {"PATH": "/bin", "FOREBAY_HOME": "/x", "HF_TOKEN": "secret", "OMP_NUM_THREADS": "2", "LC_ALL": "C"}
    assert clean_env(environ) == {"PATH": "/bin", "OMP_NUM_THREADS": "2", "LC_ALL": "C"}


def test_identity_matches_only_one_process() -> None:
    me = identify(os.getpid())
    assert me
    assert is_alive(me)
    for other in (Identity(me.pid, me.ticks + 1, me.boot), Identity(me.pid, me.ticks, "another boot")):
        assert not is_alive(other)
        kill(other, signal.SIGKILL)
    child = subprocess.Popen(["true"])
    who = identify(child.pid)
    assert who
    child.wait()
    assert not is_alive(who)
    kill(who, signal.SIGKILL)


def test_exit_status_is_described() -> None:
    assert describe(3) == "ended with exit code 3"
    assert describe(120).endswith("is the disk full?")
    assert describe(-9) == "was killed by signal 9 (SIGKILL)"
    assert describe(-63) == "was killed by signal 63"
