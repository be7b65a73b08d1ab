"""Ends and beginnings: restarts, killed gateways, and damage that no restart may hide."""

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.gateway.records.rig import (
    NOON,
    Disk,
    audit_files,
    audit_ids,
    decision_ids,
    facts,
    killed,
    ledger_sums,
    request_ids,
    started,
)

from forebay.gateway.records.audit import lines_after
from forebay.gateway.records.recorder import CHECKPOINT_S
from forebay.gateway.records.saved import DAY_S, Sums
from forebay.gateway.records.verifying import FLAWS_MAX, verify
from forebay.gateway.records.writer import OwnFolder


def test_a_restart_continues_the_chain_and_the_ledger(tmp_path: Path) -> None:
    for start in range(0, 30, 10):
        records = started(tmp_path, file_bytes_max=3000)
        for n in range(start, start + 10):
            records.finished(facts(n))
        records.close()
    lines = list(lines_after(tmp_path / "gateway-0", 0, 100))

    assert [line.seq for line in lines] == list(range(1, 31))
    assert verify(tmp_path / "gateway-0").ok
    assert decision_ids(tmp_path) == request_ids(range(30))
    assert ledger_sums(tmp_path) == Sums(30, 300, 150, 60, 0)


def test_processes_of_one_gateway_use_separate_folders(tmp_path: Path) -> None:
    old, new = started(tmp_path), started(tmp_path)
    for n, records in enumerate((old, new, old, new)):
        records.finished(facts(n))
        records.flush(0.0)
    old.close()
    newest = started(tmp_path)
    newest.finished(facts(4))
    newest.close()
    new.close()

    assert [decision_ids(tmp_path, name) for name in ("gateway-0", "gateway-0+1")] == [
        ["req-0", "req-2", "req-4"],
        ["req-1", "req-3"],
    ]
    assert all(verify(folder).ok for folder in sorted(tmp_path.iterdir()))
    assert ledger_sums(tmp_path).requests == 5


def test_number_of_record_folders_per_gateway_is_limited(tmp_path: Path) -> None:
    held = [OwnFolder(tmp_path, "gateway-0") for _ in range(16)]
    with pytest.raises(OSError, match="other processes"):
        OwnFolder(tmp_path, "gateway-0")
    for folder in held:
        folder.close()


KILLED = """
import os, signal, sys
from pathlib import Path
from io import StringIO
sys.path.insert(0, sys.argv[2])
from tests.gateway.records.rig import facts, started
records = started(Path(sys.argv[1]))
for n in range(50):
    records.finished(facts(n))
    if n == 10:
        records.flush(0.0)  # with a checkpoint
    if n == 40:
        records.flush(0.1)
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_sigkill_loses_at_most_the_last_write(tmp_path: Path) -> None:
    here = str(Path(__file__).parents[3])
    done = subprocess.run([sys.executable, "-c", KILLED, str(tmp_path), here], timeout=60)

    assert done.returncode == -9
    assert ledger_sums(tmp_path).requests == 41, "the reader looks beyond the checkpoint"
    records = started(tmp_path)
    records.finished(facts(50))
    records.close()
    assert audit_ids(tmp_path) == [*request_ids(range(41)), "req-50"]
    report = verify(tmp_path / "gateway-0")
    assert (report.ok, [gap.event for gap in report.gaps]) == (True, ["killed"]), "nine are lost"
    assert ledger_sums(tmp_path).requests == 42


@given(st.lists(st.sampled_from(("finish", "yesterday", "flush", "checkpoint", "kill", "stop")), max_size=25))
def test_written_requests_are_counted_exactly_once_across_restarts(
    tmp_path_factory: pytest.TempPathFactory, steps: list[str]
) -> None:
    root = tmp_path_factory.mktemp("records")
    disk = Disk()
    records, now, known, noted = started(root, disk, file_bytes_max=4000), 0.0, 0, 0
    for n, step in enumerate(steps):
        match step:
            case "finish" | "yesterday":
                records.finished(facts(n, ts=NOON - DAY_S * (step == "yesterday")))
                noted += 1
            case "flush" | "checkpoint":
                now += CHECKPOINT_S * (step == "checkpoint")
                records.flush(now)
                known, noted = known + noted, 0
            case "kill":
                killed(records, disk)
                records, noted = started(root, disk, file_bytes_max=4000), 0
            case _:
                records.close()
                records, known, noted = started(root, disk, file_bytes_max=4000), known + noted, 0
        assert ledger_sums(root).requests == known
    records.close()
    total = known + noted
    assert ledger_sums(root) == Sums(total, 10 * total, 5 * total, 2 * total)
    assert verify(root / "gateway-0").ok


def test_an_unfinished_line_is_cut_off_and_the_log_says_so(tmp_path: Path) -> None:
    records = started(tmp_path)
    records.finished(facts(1))
    records.close()
    with audit_files(tmp_path)[0].open("ab") as file:
        file.write(b'{"seq":2,"prev":"ab')
    assert verify(tmp_path / "gateway-0").files[0].unfinished_bytes == 19
    records = started(tmp_path)
    records.finished(facts(2))
    records.close()
    report = verify(tmp_path / "gateway-0")

    assert report.ok
    assert [gap.lines for gap in report.gaps] == [1]
    assert audit_ids(tmp_path) == ["req-1", "req-2"]


def test_truncated_batch_is_sealed_at_the_next_start_and_noted(tmp_path: Path) -> None:
    disk = Disk()
    records = started(tmp_path, disk)
    records.finished(facts(0))
    records.flush(0.0)
    for n in range(1, 5):
        records.finished(facts(n))
    disk.room = 1000 + len((tmp_path / "gateway-0" / "audit.head").read_bytes())
    records.flush(0.0)
    killed(records, disk)
    unsealed = verify(tmp_path / "gateway-0").files[-1].unfinished_bytes
    assert unsealed
    kept = audit_ids(tmp_path)
    assert 1 < len(kept) < 5
    assert ledger_sums(tmp_path).requests == len(kept)
    records = started(tmp_path)
    records.finished(facts(5))
    records.close()
    report = verify(tmp_path / "gateway-0")

    assert report.ok
    assert [(line.event, line.lines) for line in report.gaps] == [("killed", 0), ("late", len(kept) - 1), ("gap", 1)]
    assert audit_ids(tmp_path) == [*kept, "req-5"]
    assert ledger_sums(tmp_path).requests == len(kept) + 1
    assert report.files[-1].unfinished_bytes == 0


def test_partial_writes_on_a_full_disk_are_counted_once_by_the_successor(tmp_path: Path) -> None:
    disk = Disk()
    records = started(tmp_path, disk)
    for n in range(5):
        records.finished(facts(n))
    disk.room = 1000
    records.close()
    kept = audit_ids(tmp_path)
    assert 0 < len(kept) < 5
    assert ledger_sums(tmp_path).requests == 5
    for file in (tmp_path / "gateway-0").glob("decisions-*"):
        file.unlink()  # of these, too, one may be cut off
    records = started(tmp_path)
    records.finished(facts(5))
    records.close()

    assert ledger_sums(tmp_path).requests == 6
    assert audit_ids(tmp_path) == [*kept, "req-5"]
    assert verify(tmp_path / "gateway-0").ok


def test_empty_newest_file_hides_no_uncounted_lines(tmp_path: Path) -> None:
    """A full disk still creates files, but takes nothing into them, nor the ledger's counts."""
    disk = Disk()
    records = started(tmp_path, disk)
    for n in range(5):
        records.finished(facts(n))
        records.flush(0.0)
    killed(records, disk)
    audit_files(tmp_path)[0].with_name("audit-00000002.jsonl").touch()

    assert ledger_sums(tmp_path).requests == 5
    records = started(tmp_path)
    records.finished(facts(5))
    records.close()
    assert ledger_sums(tmp_path).requests == 6
    assert audit_ids(tmp_path) == request_ids(range(6))


def test_seal_of_a_truncated_batch_stays_in_its_file(tmp_path: Path) -> None:
    """Even if it makes that file a little larger than configured."""
    disk = Disk()
    records = started(tmp_path, disk, decisions=False)
    records.finished(facts(0))
    records.flush(0.0)
    for n in range(1, 5):
        records.finished(facts(n))
    disk.room = 1200
    records.flush(0.0)
    killed(records, disk)
    size = audit_files(tmp_path)[0].stat().st_size
    records = started(tmp_path, file_bytes_max=size, decisions=False)
    records.finished(facts(5))
    records.close()

    report = verify(tmp_path / "gateway-0")
    assert (report.ok, [line.event for line in report.gaps]) == (True, ["killed", "late", "gap"])
    assert len(report.files) == 2


def cut(root: Path, lines: int) -> None:
    """Remove the last lines of the newest file."""
    path = audit_files(root)[-1]
    path.write_bytes(b"".join(path.read_bytes().splitlines(keepends=True)[:-lines]))


def no_head(root: Path) -> None:
    (root / "gateway-0" / "audit.head").unlink()


def change_last(root: Path) -> None:
    path = audit_files(root)[-1]
    before, _, after = path.read_bytes().rpartition(b"acme")
    path.write_bytes(before + b"evil" + after)


def remove_files(root: Path) -> None:
    for path in audit_files(root):
        path.unlink()


@pytest.mark.parametrize(
    "harm", [lambda root: cut(root, 1), lambda root: cut(root, 3), no_head, change_last, remove_files]
)
def test_restart_does_not_hide_damage_of_the_audit_log(tmp_path: Path, harm: Callable[[Path], None]) -> None:
    records = started(tmp_path)
    for n in range(3):
        records.finished(facts(n))
    records.close()
    harm(tmp_path)
    assert not verify(tmp_path / "gateway-0").ok
    for n in range(3, 6):
        records = started(tmp_path)
        records.finished(facts(n))
        records.close()

    report = verify(tmp_path / "gateway-0")
    assert not report.ok
    assert report.files[-1].lines >= 3, "it goes on"


def test_flaws_beyond_the_listed_ones_are_counted(tmp_path: Path) -> None:
    records = started(tmp_path)
    for n in range(FLAWS_MAX + 20):
        records.finished(facts(n))
        records.flush(0.0)
    records.close()
    path = audit_files(tmp_path)[0]
    path.write_bytes(path.read_bytes().replace(b"acme", b"evil"))
    report = verify(tmp_path / "gateway-0").files[0]

    assert (len(report.flaws), report.flaws_more) == (FLAWS_MAX, 20)


def test_reenabled_audit_log_continues_its_chain(tmp_path: Path) -> None:
    for n, on in enumerate((True, False, True)):
        records = started(tmp_path, audit=on)
        records.finished(facts(n))
        records.close()

    assert audit_ids(tmp_path) == ["req-0", "req-2"]
    assert ledger_sums(tmp_path).requests == 3
    assert verify(tmp_path / "gateway-0").ok
