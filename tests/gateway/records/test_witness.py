"""Chains that are gone, cut short, or put back from an old copy: who else knows of them, and what is no damage."""

import os
import shutil
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest
from tests.gateway.records.rig import Disk, audit_files, audit_ids, facts, killed, ledger_sums, started

from forebay.gateway.records import audit
from forebay.gateway.records.recorder import Recorder
from forebay.gateway.records.saved import MARK, heads_beside, read_head
from forebay.gateway.records.verifying import ChainReport, verify, verify_all
from forebay.wire.records import NOTHING, AuditLine, Chain, Event, Head, Kind, audit_line


def run(root: Path, *gateways: str, requests: int = 3, **settings: int | bool) -> None:
    """Each comes up, writes some requests, and stops."""
    for gateway in gateways:
        records = started(root, gateway=gateway, **settings)
        for n in range(requests):
            records.finished(facts(n))
        records.close()


def flaws(reports: list[ChainReport]) -> list[tuple[str, Kind]]:
    return [
        (report.chain, flaw.kind)
        for report in reports
        for flaw in [*report.flaws, *(flaw for file in report.files for flaw in file.flaws)]
    ]


def events(root: Path, gateway: str = "gateway-0") -> list[str]:
    """What the log says of itself."""
    lines = [
        audit_line(raw) for path in (root / gateway).glob("audit-*.jsonl") for raw in path.read_bytes().split(b"\n")
    ]
    return [line.event for line in lines if line is not None and line.event not in (Event.REQUEST, Event.SEAL)]


def erase_log(root: Path) -> None:
    for path in (root / "gateway-0").glob("audit*"):
        path.unlink()


def erase_all_but_lock(root: Path) -> None:
    for path in (root / "gateway-0").iterdir():
        if path.name != "lock":
            path.unlink()


def erase_all_but_ledger(root: Path) -> None:
    erase_log(root)
    (root / "gateway-0/lock").unlink()


ERASED: list[Callable[[Path], None]] = [erase_log, erase_all_but_lock, erase_all_but_ledger]


# --- a chain that is gone


@pytest.mark.parametrize("erase", ERASED)
def test_missing_audit_log_is_detected_by_other_records_in_its_folder(
    tmp_path: Path, erase: Callable[[Path], None]
) -> None:
    run(tmp_path, "gateway-0")
    assert flaws(verify_all(tmp_path)) == []
    erase(tmp_path)

    assert flaws(verify_all(tmp_path)) == [("gateway-0", Kind.MISSING)]
    assert not verify_all(tmp_path, archived=True)[0].ok, "where it was is known"


@pytest.mark.parametrize("erase", ERASED)
def test_restart_does_not_hide_a_missing_audit_log(tmp_path: Path, erase: Callable[[Path], None]) -> None:
    run(tmp_path, "gateway-0")
    before = ledger_sums(tmp_path).requests
    erase(tmp_path)
    ledger = (tmp_path / "gateway-0/usage.json").exists()
    disk = Disk()
    killed(started(tmp_path, disk), disk)  # before it could write that
    run(tmp_path, "gateway-0")
    run(tmp_path, "gateway-0")
    report = verify(tmp_path / "gateway-0")

    assert events(tmp_path) == ["broken"]
    assert Kind.ON_RECORD in [kind for _, kind in flaws([report])]
    assert (Kind.MISSING in [kind for _, kind in flaws([report])]) == ledger, "the numbers go on"
    assert ledger_sums(tmp_path).requests == 6 + before * ledger


def test_folder_without_audit_log_by_configuration_is_valid(tmp_path: Path) -> None:
    run(tmp_path, "gateway-0", audit=False)
    (tmp_path / "gateway-1").mkdir()
    assert verify_all(tmp_path) == []
    run(tmp_path, "gateway-0")

    assert flaws(verify_all(tmp_path)) == []
    assert events(tmp_path) == []


def test_audit_log_shorter_than_the_ledger_count_is_damage(tmp_path: Path) -> None:
    run(tmp_path, "gateway-0")
    shutil.copytree(tmp_path / "gateway-0", tmp_path / "old")
    run(tmp_path, "gateway-0")
    erase_log(tmp_path)
    for path in (tmp_path / "old").glob("audit*"):
        path.rename(tmp_path / "gateway-0" / path.name)
    shutil.rmtree(tmp_path / "old")

    assert flaws(verify_all(tmp_path)) == [("gateway-0", Kind.MISSING)]


# --- what other chains have seen


def test_missing_chain_folder_is_detected_by_witnesses_unless_archived(tmp_path: Path) -> None:
    run(tmp_path, "gateway-0", "gateway-1", "gateway-2")
    shutil.rmtree(tmp_path / "gateway-0")

    assert flaws(verify_all(tmp_path)) == [("gateway-0", Kind.MISSING)] * 2, "two have seen it"
    assert flaws(verify_all(tmp_path, archived=True)) == []
    run(tmp_path, "gateway-0")
    found = flaws(verify_all(tmp_path))
    assert set(found) == {("gateway-0", Kind.REPLACED)}, "it begins anew, with as many lines or more"
    assert not all(report.ok for report in verify_all(tmp_path, archived=True))


def test_removed_gateways_are_no_damage_while_their_logs_remain(tmp_path: Path) -> None:
    for _ in range(3):
        run(tmp_path, "gateway-0", "gateway-1", "gateway-0+1")
    run(tmp_path, "gateway-0")
    reports = verify_all(tmp_path)

    assert flaws(reports) == []
    assert [report.chain for report in reports] == ["gateway-0", "gateway-0+1", "gateway-1"]
    assert events(tmp_path, "gateway-1") == ["witness"] * 5
    assert [gap for report in reports for gap in report.gaps] == []


def test_restored_old_copy_of_a_chain_is_detected_even_after_growth(tmp_path: Path) -> None:
    run(tmp_path, "gateway-0")
    shutil.copytree(tmp_path / "gateway-0", tmp_path.parent / "copy")
    run(tmp_path, "gateway-0", "gateway-1")
    shutil.rmtree(tmp_path / "gateway-0")
    shutil.move(tmp_path.parent / "copy", tmp_path / "gateway-0")
    assert verify(tmp_path / "gateway-0").ok, "by itself it is whole"

    assert flaws(verify_all(tmp_path)) == [("gateway-0", Kind.MISSING)]
    run(tmp_path, "gateway-0", requests=20)
    assert flaws(verify_all(tmp_path)) == [("gateway-0", Kind.REPLACED)]


def test_renamed_chain_folder_is_detected(tmp_path: Path) -> None:
    run(tmp_path, "gateway-0", "gateway-1")
    (tmp_path / "gateway-0").rename(tmp_path / "gateway-9")

    assert ("gateway-0", Kind.MISSING) in flaws(verify_all(tmp_path))


def test_pruning_after_a_witness_is_no_damage_and_witnesses_are_repeated(tmp_path: Path) -> None:
    run(tmp_path, "gateway-0", "gateway-1")
    for _ in range(10):
        run(tmp_path, "gateway-0", requests=10, file_bytes_max=2500, audit_files_max=2)
    assert len(audit_files(tmp_path)) == 2
    assert flaws(verify_all(tmp_path)) == []
    records = started(tmp_path, gateway="gateway-1", file_bytes_max=2500, audit_files_max=2)
    for n in range(60):
        records.finished(facts(n))
        records.flush(0.0)
    records.close()
    assert flaws(verify_all(tmp_path)) == []
    shutil.rmtree(tmp_path / "gateway-0")

    assert ("gateway-0", Kind.MISSING) in flaws(verify_all(tmp_path)), "though its first witnesses were pruned"


def test_chains_are_witnessed_a_minute_after_the_start_and_then_hourly(tmp_path: Path) -> None:
    first = started(tmp_path)
    log = first._audit
    assert log is not None
    second = started(tmp_path, gateway="gateway-1")

    def minutes_later(minutes: float) -> list[int]:
        log._looked -= 60.0 * minutes  # as if it had been longer ago
        first.flush(0.0)
        return [sum(event == "witness" for event in events(tmp_path))]

    assert minutes_later(0) == [0]
    assert minutes_later(1.1) == [1]
    second.finished(facts(1))
    second.flush(0.0)
    assert [minutes_later(30), minutes_later(29), minutes_later(2)] == [[1], [1], [2]]
    assert minutes_later(61) == [2], "nothing has happened there"
    assert minutes_later(-9000) == [2], "a clock that goes back harms nobody"
    first.close()
    second.close()
    assert flaws(verify_all(tmp_path)) == []


# --- hostile neighbours


def garbage(head: Path) -> None:
    head.write_bytes(b'{"seq":')


def huge(head: Path) -> None:
    head.write_bytes(msgspec.json.encode(Head(5, "a" * 10_000_000)))


def negative(head: Path) -> None:
    head.write_bytes(msgspec.json.encode(Head(-5, NOTHING)))


def no_hash(head: Path) -> None:
    head.write_bytes(msgspec.json.encode(Head(5, "\x1b[2J")))


def folder(head: Path) -> None:
    head.mkdir()


def pipe(head: Path) -> None:
    os.mkfifo(head)


def link(head: Path) -> None:
    head.symlink_to("/dev/zero")


def nested(head: Path) -> None:
    head.write_bytes(b"[" * 100_000)


@pytest.mark.parametrize("make", [garbage, huge, negative, no_hash, folder, pipe, link, nested])
def test_an_invalid_chain_head_is_ignored(tmp_path: Path, make: Callable[[Path], None]) -> None:
    (tmp_path / "gateway-1").mkdir()
    make(tmp_path / "gateway-1/audit.head")
    (tmp_path / os.fsdecode(b"\xff\x1b")).mkdir()
    shutil.copytree(tmp_path / "gateway-1", tmp_path / "a\x1b[2J", ignore=lambda *_: ["audit.head"])
    (tmp_path / "a\x1b[2J/audit.head").write_bytes(msgspec.json.encode(Head()))

    assert heads_beside(tmp_path / "gateway-0") == {}
    run(tmp_path, "gateway-0")
    assert events(tmp_path) == []
    assert verify(tmp_path / "gateway-0").ok


def test_altered_witness_damages_only_its_own_chain(tmp_path: Path) -> None:
    run(tmp_path, "gateway-0", "gateway-1")
    path = tmp_path / "gateway-1/audit-00000001.jsonl"
    path.write_bytes(path.read_bytes().replace(b'"other_seq":3', b'"other_seq":9'))

    assert flaws(verify_all(tmp_path)) == [("gateway-1", Kind.CHANGED)]


def test_forged_witness_is_reported_as_the_damage_that_it_claims(tmp_path: Path) -> None:
    run(tmp_path, "gateway-0")
    chain, target = Chain("gateway-1", Head()), tmp_path / "gateway-1"
    target.mkdir()
    for other, seq in (("gateway-0", 2), ("gateway-0", -1), ("\x1b[2J", 1), ("", 0), ("gateway-1", 1 << 70)):
        chain.add(AuditLine(0, Event.WITNESS, 1.0, other=other, other_seq=min(seq, 1 << 62), other_hash="f" * 64))
    (target / "audit-00000001.jsonl").write_bytes(chain.seal(1.0))
    (target / "audit.head").write_bytes(msgspec.json.encode(chain.head))

    assert set(flaws(verify_all(tmp_path))) == {
        ("", Kind.MISSING),
        ("\x1b[2J", Kind.MISSING),
        ("gateway-0", Kind.REPLACED),
        ("gateway-1", Kind.MISSING),
    }


def test_witness_written_during_verification_is_no_damage(tmp_path: Path) -> None:
    run(tmp_path, "gateway-0", "gateway-1")
    calls = 0

    def meanwhile() -> None:
        nonlocal calls
        calls += 1
        if calls == 4:  # gateway-0 was read, gateway-1 is about to be
            run(tmp_path, "gateway-0", "gateway-1")

    assert flaws(verify_all(tmp_path, check_cancelled=meanwhile)) == []
    assert calls == 4
    assert flaws(verify_all(tmp_path)) == []


# --- gateways that were killed


def test_unclean_shutdown_is_noted_at_the_next_start(tmp_path: Path) -> None:
    disk = Disk()
    records = started(tmp_path, disk)
    records.finished(facts(0))
    records.flush(0.0)
    records.finished(facts(1))
    killed(records, disk)
    run(tmp_path, "gateway-0", requests=1)
    run(tmp_path, "gateway-0", requests=1)
    report = verify(tmp_path / "gateway-0")

    assert report.ok
    assert [(gap.event, gap.lines, gap.why) for gap in report.gaps] == [("killed", 0, audit.KILLED)]
    assert audit_ids(tmp_path) == ["req-0", "req-0", "req-0"], "and the one in between is lost"


def test_repeated_unclean_shutdown_before_the_note_is_noted_once(tmp_path: Path) -> None:
    for _ in range(3):
        disk = Disk()
        killed(started(tmp_path, disk), disk)
    run(tmp_path, "gateway-0")

    assert events(tmp_path) == ["killed"]


def test_close_with_unwritten_records_is_an_unclean_shutdown(tmp_path: Path) -> None:
    disk = Disk()
    records = started(tmp_path, disk)
    records.finished(facts(0))
    disk.room = 0
    records.close()
    run(tmp_path, "gateway-0", requests=1)

    assert events(tmp_path) == ["killed"]


def test_chain_head_of_an_earlier_version_has_no_shutdown_state(tmp_path: Path) -> None:
    run(tmp_path, "gateway-0")
    head = read_head(tmp_path / "gateway-0")
    (tmp_path / "gateway-0/audit.head").write_bytes(msgspec.json.encode(head))
    (tmp_path / "gateway-0/lock").write_bytes(b"")
    run(tmp_path, "gateway-0")

    assert events(tmp_path) == []
    assert (tmp_path / "gateway-0/lock").read_bytes() == MARK


def test_unwritable_chain_head_at_the_start_does_not_stop_records(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run(tmp_path, "gateway-0")

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(audit, "save_head", full)
        records: Recorder = started(tmp_path)
        records.finished(facts(9))
        records.flush(0.0)
    records.close()

    assert audit_ids(tmp_path)[-1] == "req-9"
    assert flaws(verify_all(tmp_path)) == []
    assert records.lost == 0
