"""A disk that stalls holds up no request, and costs no record."""

import asyncio
import os
import threading
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.gateway.records.rig import Disk, audit_ids, decision_ids, facts, ledger_sums, request_ids, started
from tests.gateway.rig import Worker, chat, cluster, post
from tests.net.rig import run, until

from forebay.core.model import RecordsSpec
from forebay.gateway.records import audit
from forebay.gateway.records.recorder import CHECKPOINT_S
from forebay.gateway.records.saved import DAY_S
from forebay.gateway.records.verifying import verify
from forebay.wire.records import Event


class Stalling(Disk):
    """Takes nothing while `flows` is not set."""

    def __init__(self) -> None:
        super().__init__()
        self.flows = threading.Event()
        self.stuck = threading.Event()

    def open(self, path: Path) -> Disk.File:
        self.stuck.set()
        assert self.flows.wait(10.0)
        return super().open(path)


def during_a_stall(disk: Stalling, flush: Coroutine[Any, Any, None], meanwhile: Callable[[], None]) -> None:
    """Do something while a flush has to wait for the disk."""

    async def main() -> None:
        async with asyncio.TaskGroup() as group:
            flushing = group.create_task(flush)
            await until(disk.stuck.is_set)
            meanwhile()
            assert not flushing.done()
            disk.flows.set()

    run(main())


def test_requests_ending_during_a_disk_stall_are_recorded_once(tmp_path: Path) -> None:
    disk = Stalling()
    records = started(tmp_path, disk)
    for n in range(5):
        records.finished(facts(n))

    def meanwhile() -> None:
        for n in range(5, 10):
            records.finished(facts(n, ts=facts(0).ts + (n - 5) // 3 * DAY_S))

    during_a_stall(disk, records.flush_aside(0.0), meanwhile)
    assert (decision_ids(tmp_path), audit_ids(tmp_path)) == (request_ids(range(5)), request_ids(range(5)))
    assert ledger_sums(tmp_path).requests == 5
    run(records.flush_aside(CHECKPOINT_S))
    assert decision_ids(tmp_path) == audit_ids(tmp_path) == request_ids(range(10))
    assert ledger_sums(tmp_path).requests == 10
    records.finished(facts(10))
    records.close()
    assert ledger_sums(tmp_path).requests == 11
    report = verify(tmp_path / "gateway-0")
    assert (report.ok, report.gaps, records.lost) == (True, [], 0)


def test_records_dropped_during_a_disk_stall_are_reported(tmp_path: Path) -> None:
    disk = Stalling()
    records = started(tmp_path, disk, prompts=True)
    records.finished(facts(0))
    prompt = b"x" * audit.PROMPT_BYTES_MAX

    def meanwhile() -> None:
        for n in range(1, 300):
            records.finished(facts(n, prompt=prompt))

    during_a_stall(disk, records.flush_aside(0.0), meanwhile)
    records.close()
    missing = 300 - len(audit_ids(tmp_path))
    report = verify(tmp_path / "gateway-0")
    assert missing > 0
    assert report.ok
    assert [(gap.lines, gap.event, gap.why) for gap in report.gaps] == [(missing, Event.GAP, audit.TOO_MANY)]
    assert records.lost == 2 * missing, "of a request, its decision and its line"
    assert decision_ids(tmp_path) == audit_ids(tmp_path)
    assert ledger_sums(tmp_path).requests == 300, "the ledger has it all"


def test_cancelling_a_flush_during_a_stall_loses_no_record(tmp_path: Path) -> None:
    disk = Stalling()
    records = started(tmp_path, disk)
    records.finished(facts(0))

    async def main() -> None:
        async with asyncio.TaskGroup() as group:
            flushing = group.create_task(records.flush_aside(0.0))
            await until(disk.stuck.is_set)
            records.finished(facts(1))
            flushing.cancel()
            await asyncio.sleep(0)
            assert not flushing.done(), "the thread still has the books"
            disk.flows.set()
        assert flushing.cancelled()
        records.finished(facts(2))
        await records.flush_aside(0.0)
        assert decision_ids(tmp_path) == audit_ids(tmp_path) == request_ids(range(3)), (
            "the next one is not cancelled with it"
        )

    run(main())
    records.close()
    assert ledger_sums(tmp_path).requests == 3


@given(st.lists(st.sampled_from(["ends", "flushes", "flushes aside", "has room"]), max_size=30), st.integers(0, 4000))
def test_every_request_is_recorded_after_any_disk_events(
    tmp_path_factory: pytest.TempPathFactory, events: list[str], room: int
) -> None:
    root = tmp_path_factory.mktemp("records")
    disk = Disk(room)
    records, ended = started(root, disk), 0

    async def aside(now: float) -> None:
        nonlocal ended
        async with asyncio.TaskGroup() as group:
            group.create_task(records.flush_aside(now))
            await asyncio.sleep(0)  # the books are away
            records.finished(facts(ended))
            ended += 1

    with asyncio.Runner() as runner:
        for at, event in enumerate(events):
            if event == "ends":
                records.finished(facts(ended))
                ended += 1
            elif event == "flushes":
                records.flush(at * CHECKPOINT_S)
            elif event == "flushes aside":
                runner.run(aside(at * CHECKPOINT_S))
            else:
                disk.room = 1 << 40
    disk.room = 1 << 40
    records.close()
    assert decision_ids(root) == audit_ids(root) == request_ids(range(ended))
    assert ledger_sums(root).requests == ended


def test_gateway_serves_requests_during_a_disk_stall(tmp_path: Path) -> None:
    root = tmp_path / "records"

    async def main() -> None:
        async with cluster(tmp_path, Worker(), records=RecordsSpec(str(root))) as front:
            await front.ready()
            draft = root / "gateway-0" / ".audit.head.new"
            os.mkfifo(draft)  # whoever opens it to write waits for somebody who reads
            assert (await front.ask(post(chat()))).status == 200
            await until(lambda: bool(audit_ids(root)))  # the head is what comes next
            for _ in range(3):
                assert (await front.ask(post(chat()))).status == 200
            reader = os.open(draft, os.O_RDONLY | os.O_NONBLOCK)
            await until(lambda: not draft.exists())  # it went on, and put the pipe into place
            os.close(reader)
            assert (await front.ask(post(chat()))).status == 200

    run(main())
    assert verify(root / "gateway-0").ok
    assert len(audit_ids(root)) == ledger_sums(root).requests == 5


def test_records_that_cannot_be_written_show_in_the_metrics_until_they_can(tmp_path: Path) -> None:
    block = tmp_path / "disk"
    block.write_bytes(b"")  # a file where the folder should be

    async def main() -> None:
        async with cluster(tmp_path, Worker(), records=RecordsSpec(str(block / "records"))) as front:
            assert (await front.ask(post(chat()))).status == 200
            for failing in (1.0, 0.0):
                async with asyncio.timeout(10):
                    while await front.metric("forebay_records_failing") != failing:
                        await asyncio.sleep(0.01)
                if failing:
                    block.unlink()

    run(main())
    assert list((block / "records").rglob("audit-*.jsonl"))
