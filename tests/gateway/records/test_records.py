"""Records on disk: all three books, rotation, full disks; no line is lost unless the log says so."""

from io import StringIO
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.gateway.records.rig import (
    DAY,
    NOON,
    Disk,
    audit_files,
    audit_ids,
    decision_ids,
    facts,
    ledger_sums,
    recorder,
    request_ids,
    started,
)  # fmt: skip

from forebay.core.model import RecordsSpec
from forebay.core.tenancy import ENTROPY_BYTES, mint
from forebay.gateway.records import audit
from forebay.gateway.records.audit import lines_after
from forebay.gateway.records.recorder import CHECKPOINT_S, Recorder
from forebay.gateway.records.saved import Sums, day_text
from forebay.gateway.records.verifying import verify
from forebay.gateway.records.writer import FRAME_DECISIONS_MAX, Series, numbered
from forebay.obs import log
from forebay.wire.records import FRAME_BYTES_MAX, Event, Kind


def test_request_is_recorded_in_ledger_decisions_and_audit_log(tmp_path: Path) -> None:
    records = started(tmp_path)
    records.finished(facts(1))
    records.flush(0.0)

    assert decision_ids(tmp_path) == audit_ids(tmp_path) == ["req-1"]
    assert ledger_sums(tmp_path) == Sums(1, 10, 5, 2, 0)
    (line,) = lines_after(tmp_path / "gateway-0", 0, 1)
    assert (line.tenant, line.key, line.client, line.revision) == ("acme", "key-1", "127.0.0.1", "r-1")
    assert (line.replica, line.code, line.ms, line.ts) == ("chat-0", "ok", 500, NOON)
    records.close()
    assert verify(tmp_path / "gateway-0").ok


def test_only_the_owner_may_read_records(tmp_path: Path) -> None:
    records = started(tmp_path)
    records.finished(facts(1))
    records.close()
    folder = tmp_path / "gateway-0"

    assert folder.stat().st_mode & 0o077 == 0
    assert [path.name for path in folder.iterdir() if path.stat().st_mode & 0o077] == []


@pytest.mark.parametrize("prompts", [False, True])
def test_prompts_are_stored_only_if_configured(tmp_path: Path, prompts: bool) -> None:
    records = started(tmp_path, prompts=prompts)
    key, record = mint("team", bytes(ENTROPY_BYTES), now=0.0)
    records.finished(facts(1, prompt=b'{"messages":"a secret \xff question"}'))
    records.finished(facts(2, prompt=f'{{"messages":"is {key} your key?"}}'.encode()))
    records.close()
    everything = b"".join(path.read_bytes() for path in (tmp_path / "gateway-0").iterdir())

    assert records.prompts == prompts
    assert (b"secret" in everything) == prompts
    assert (f"is fb-{record.id}-… your key?".encode() in everything) == prompts
    assert key[12:].encode() not in everything
    assert verify(tmp_path / "gateway-0").ok


def test_disabled_records_are_not_written(tmp_path: Path) -> None:
    records = started(tmp_path, decisions=False, audit=False, prompts=True)
    records.finished(facts(1))
    records.close()

    assert sorted(path.name for path in (tmp_path / "gateway-0").iterdir()) == [
        "lock", f"usage-{day_text(DAY)}.json", "usage.json",
    ]  # fmt: skip
    assert not records.prompts
    assert ledger_sums(tmp_path).requests == 1


# --- rotation


def test_record_files_are_bounded_and_the_oldest_decisions_removed(tmp_path: Path) -> None:
    records = started(tmp_path, file_bytes_max=2000, decision_files_max=3)
    for n in range(100):
        records.finished(facts(n))
        if n % 7 == 0:
            records.flush(0.0)
    records.close()
    kept = decision_ids(tmp_path)

    assert len(numbered(tmp_path / "gateway-0", "decisions", ".log")) == 3
    assert kept == request_ids(range(100))[-len(kept) :]
    assert audit_ids(tmp_path) == request_ids(range(100)), "audit lines all stay"
    assert all(path.stat().st_size <= 2000 for path in (tmp_path / "gateway-0").iterdir())
    assert verify(tmp_path / "gateway-0").ok


@pytest.mark.parametrize("which", [0, 2, -1])
def test_removed_audit_file_is_detected(tmp_path: Path, which: int) -> None:
    records = started(tmp_path, file_bytes_max=2000)
    for n in range(40):
        records.finished(facts(n))
    records.close()
    files = audit_files(tmp_path)
    gone = [path.name for path in files][which]
    files[which].unlink()
    report = verify(tmp_path / "gateway-0")
    flaws = [*report.flaws, *(flaw for file in report.files for flaw in file.flaws)]

    assert len(files) > 4
    assert not report.ok
    assert [flaw.kind for flaw in flaws] == [Kind.MISSING], gone
    assert verify(tmp_path / "gateway-0", archived=True).ok == (which == 0)


def test_pruned_audit_files_are_recorded(tmp_path: Path) -> None:
    records = started(tmp_path, file_bytes_max=2000, audit_files_max=2)
    for n in range(60):
        records.finished(facts(n))
        records.flush(0.0)
    records.close()

    assert len(audit_files(tmp_path)) <= 3
    assert verify(tmp_path / "gateway-0").ok
    assert ledger_sums(tmp_path).requests == 60
    audit_files(tmp_path)[0].unlink()
    assert not verify(tmp_path / "gateway-0").ok


# --- full disks


@given(
    rooms=st.lists(st.integers(0, 30), min_size=1, max_size=30),
    sizes=st.lists(st.integers(1, 12), min_size=1, max_size=12),
)
def test_record_series_loses_and_repeats_nothing_under_partial_writes(
    tmp_path_factory: pytest.TempPathFactory, rooms: list[int], sizes: list[int]
) -> None:
    folder, disk = tmp_path_factory.mktemp("series"), Disk(0)
    series = Series("a", ".x", 20, disk.open)
    series.start(folder)
    pieces = [bytes([65 + n]) * size for n, size in enumerate(sizes)]
    for n, room in enumerate([*rooms, 1000]):
        for piece in pieces[n : n + 1] if n < len(rooms) else pieces[n:]:
            series.add(piece)
        disk.room += room
        try:
            series.write()
        except OSError:
            assert series.held
    series.close()
    contents = [path.read_bytes() for _, path in numbered(folder, "a", ".x")]

    assert b"".join(contents) == b"".join(pieces)
    assert all(len(content) <= 20 for content in contents)
    assert all(sum(piece in content for content in contents) == 1 for piece in pieces), "no piece is cut in two"
    assert (series.held, series.held_bytes) == ([], 0)


def test_full_disk_loses_no_records_if_fixed_in_time(tmp_path: Path) -> None:
    disk = Disk()
    records = started(tmp_path, disk)
    for n in range(20):
        disk.room = 300 if n == 5 else 1 << 30 if n == 15 else disk.room
        records.finished(facts(n))
        records.flush(n * CHECKPOINT_S)
    records.close()

    assert decision_ids(tmp_path) == audit_ids(tmp_path) == request_ids(range(20))
    report = verify(tmp_path / "gateway-0")
    assert (report.ok, report.gaps) == (True, [])
    assert ledger_sums(tmp_path).requests == 20
    assert records.lost == 0


def test_audit_overflow_is_a_gap_line_with_the_number_of_lost_records(tmp_path: Path) -> None:
    disk = Disk(0)
    records = started(tmp_path, disk, prompts=True)
    prompt = b"x" * audit.PROMPT_BYTES_MAX
    for n in range(300):
        records.finished(facts(n, prompt=prompt))
        if n % 100 == 0:
            records.flush(0.0)
    disk.room = 1 << 40
    records.finished(facts(300))
    records.flush(CHECKPOINT_S)
    records.finished(facts(301))
    records.close()
    report = verify(tmp_path / "gateway-0")
    kept = audit_ids(tmp_path)
    missing = 302 - len(kept)

    assert report.ok
    assert missing > 1
    assert [(gap.lines, gap.event) for gap in report.gaps] == [(missing, Event.GAP)]
    assert "No space left" in report.gaps[0].why
    assert kept == [*request_ids(range(300 - missing + 1)), "req-301"]
    assert ledger_sums(tmp_path).requests == 302, "the ledger has it all"
    assert records.lost == missing
    assert decision_ids(tmp_path) == request_ids(range(302)), "decisions are smaller"


def test_audit_overflow_within_one_flush_is_a_gap_line(tmp_path: Path) -> None:
    records = started(tmp_path, prompts=True, decisions=False)
    for n in range(300):
        records.finished(facts(n, prompt=b"x" * audit.PROMPT_BYTES_MAX))
    records.close()
    gaps = verify(tmp_path / "gateway-0").gaps

    assert [(gap.lines, gap.why) for gap in gaps] == [(records.lost, audit.TOO_MANY)]
    assert len(audit_ids(tmp_path)) + records.lost == 300


def test_a_decision_that_is_too_large_is_dropped_and_counted(tmp_path: Path) -> None:
    records = started(tmp_path)
    records.finished(facts(1, tenant="x" * FRAME_BYTES_MAX))
    records.finished(facts(2))
    records.close()

    assert decision_ids(tmp_path) == ["req-2"]
    assert records.lost == 1


def test_decisions_that_are_never_written_are_counted_one_by_one(tmp_path: Path) -> None:
    records = started(tmp_path, Disk(room=0), audit=False)
    for n in range(FRAME_DECISIONS_MAX + 5):
        records.finished(facts(n))
    records.close()

    assert records.lost == FRAME_DECISIONS_MAX + 5


def test_file_that_accepts_no_bytes_raises_an_error(tmp_path: Path) -> None:
    class Deaf:
        def write(self, data: bytes, /) -> None:
            """As a file that would block."""

        def close(self) -> None:
            """Nothing to close."""

    series = Series("a", ".x", 100, lambda path: Deaf())
    series.start(tmp_path)
    series.add(b"x")
    with pytest.raises(OSError, match="accepts no data"):
        series.write()


def test_unavailable_record_folder_is_retried(tmp_path: Path) -> None:
    root = tmp_path / "records"
    root.write_text("in the way")
    told_of = StringIO()
    records = Recorder(RecordsSpec(str(root)), "gateway-0", log.configure(told_of))

    assert not records.start()
    records.finished(facts(1))
    records.flush(0.0)
    root.unlink()
    records.flush(1.0)
    records.finished(facts(2))
    records.close()

    assert audit_ids(root) == ["req-2"]
    assert [gap.lines for gap in verify(root / "gateway-0").gaps] == [1]
    assert decision_ids(root) == ["req-1", "req-2"]
    assert ledger_sums(root).requests == 2
    assert [words in told_of.getvalue() for words in ("cannot be written", "written again")] == [True, True]


def test_a_recorder_that_never_had_a_folder_can_be_closed(tmp_path: Path) -> None:
    (tmp_path / "records").write_text("in the way")
    records = recorder(tmp_path / "records")
    records.finished(facts(1))
    records.close()

    assert records.lost == 2
