"""The usage ledger: what is counted, under which name, and what a file that nobody understands costs."""

from io import StringIO
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.gateway.records.rig import DAY, NOON, facts, ledger_sums, started

from forebay.core.model import RecordsSpec
from forebay.gateway.account import TEMPLATE_TOKENS_MAX, UNREPORTED, begun
from forebay.gateway.account import usage as usage_of
from forebay.gateway.records import ledger
from forebay.gateway.records.audit import AuditLog
from forebay.gateway.records.facts import Used, used
from forebay.gateway.records.ledger import Ledger, usage
from forebay.gateway.records.recorder import CHECKPOINT_S, Recorder
from forebay.gateway.records.saved import DAY_S, day_text
from forebay.obs import log
from forebay.wire.records import audit_line


def tokens(each: Used) -> tuple[int, int, int, bool]:
    return each.prompt, each.completion, each.cached, each.estimated


def test_token_counts_are_reported_ones_or_else_observed_ones() -> None:
    assert tokens(used((100, 7, 64), (99, 0, 1), (4, 3), 90)) == (100, 7, 64, False)
    assert tokens(used(None, UNREPORTED, (4, 3), 90)) == (90, 3, 0, True)
    assert tokens(used(None, (451, 0, 64), (4, 3), 90)) == (451, 3, 64, True)
    assert tokens(used(None, (451, 0, None), (1, 0), 90)) == (451, 0, 0, True)
    assert tokens(used(None, (451, 0, 64), (0, 0), 90)) == (0, 0, 0, False)


@given(st.binary(max_size=30) | st.text("0123456789,-", max_size=60).map(str.encode), st.integers(0, 1000))
def test_reported_prompt_tokens_are_limited_by_the_request_size(value: bytes, request_bytes: int) -> None:
    prompt, completion, cached = begun(usage_of(value), request_bytes)
    assert 0 <= prompt <= request_bytes + TEMPLATE_TOKENS_MAX
    assert (completion, 0 <= (cached or 0) <= prompt) == (0, True)


def test_plausible_prompt_token_counts_are_accepted() -> None:
    assert begun(usage_of(b"451,0,64"), 1000) == (451, 0, 64)
    assert begun(usage_of(b"451,99,900"), 1000) == (451, 0, 451)
    for lie in (b"-451,0,0", b"999999999999,0,0", b"9" * 40, b"451", b"", b"451,0,0,0", b"x"):
        assert begun(usage_of(lie), 1000)[0] == 0


def test_ledger_outcome_names_who_is_to_blame(tmp_path: Path) -> None:
    book = Ledger()
    for code in (
        "ok",
        "client_closed",
        "slow_consumer",
        "invalid_request",
        "replica_lost",
        "queue_full",
        "of another version",
    ):
        book.count(NOON, "acme", "chat", code, Used(1, 2, 0, estimated=code == "client_closed"))
    book.start(tmp_path)
    book.checkpoint(None)
    found = {key[2]: sums for (_, key), sums in usage(tmp_path, DAY).items()}

    others = dict.fromkeys(("ok", "client", "model", "platform", "other"), 1)
    assert {outcome: sums.requests for outcome, sums in found.items()} == others | {"cancelled": 2}
    assert found["cancelled"].estimated == 1
    assert usage(tmp_path, DAY + 1) == {}
    assert not book.dirty


def test_ledger_rows_beyond_the_limit_are_merged(tmp_path: Path) -> None:
    book = Ledger()
    book.start(tmp_path)
    for n in range(ledger.ROWS_MAX + 10):
        book.count(NOON, f"tenant-{n}", "chat", "ok", Used(1, 1, 0, estimated=False))
    book.checkpoint(None)
    found = usage(tmp_path, 0)

    assert len(found) == ledger.ROWS_MAX + 1
    assert found[DAY, ("other", "other", "ok")].requests == 10


def test_ledger_removes_old_days(tmp_path: Path) -> None:
    book = Ledger()
    book.start(tmp_path)
    for day in range(ledger.DAYS_MAX + 3):
        book.count((DAY + day) * DAY_S, "acme", "chat", "ok", Used(1, 1, 0, estimated=False))
        book.checkpoint(None)
    days = [day for day, _ in usage(tmp_path, 0)]

    assert days == list(range(DAY + 3, DAY + 3 + ledger.DAYS_MAX))


def test_unreadable_record_files_are_skipped(tmp_path: Path) -> None:
    (tmp_path / "usage-of-mine.json").write_text("{}")
    (tmp_path / f"usage-{day_text(DAY)}.json").write_text("nonsense")
    (tmp_path / "usage.json").write_text("nonsense")
    (tmp_path / "audit-mine.jsonl").write_text("nonsense")
    (tmp_path / "audit-00000001.jsonl").write_text("nonsense\n")
    book = Ledger()
    book.start(tmp_path)
    book.count(NOON, "acme", "chat", "ok", Used(1, 1, 0, estimated=False))
    book.checkpoint(0)

    assert [sums.requests for sums in usage(tmp_path, 0).values()] == [1]


def test_damaged_usage_file_is_kept_aside_and_reported(tmp_path: Path) -> None:
    told_of, name = StringIO(), f"usage-{day_text(DAY)}.json"
    records = Recorder(RecordsSpec(str(tmp_path)), "gateway-0", log.configure(told_of))
    assert records.start()
    own = tmp_path / "gateway-0"
    (own / name).write_text("nonsense")
    for n in range(2):
        records.finished(facts(n))
        records.flush(n * CHECKPOINT_S)
    records.close()

    assert (own / f"{name}.damaged").read_text() == "nonsense"
    assert told_of.getvalue().count("could not be read") == 1
    assert ledger_sums(tmp_path).requests == 2


def test_failed_checkpoint_is_reported_and_repeated(tmp_path: Path) -> None:
    told_of = StringIO()
    records = Recorder(RecordsSpec(str(tmp_path)), "gateway-0", log.configure(told_of))
    assert records.start()
    records.finished(facts(1))
    in_the_way = tmp_path / "gateway-0" / f".usage-{day_text(DAY)}.json.new"
    in_the_way.mkdir()
    records.flush(0.0)
    assert "cannot be written" in told_of.getvalue()
    in_the_way.rmdir()
    records.close()

    assert "written again" in told_of.getvalue()
    assert ledger_sums(tmp_path).requests == 1


def test_altered_audit_line_is_not_counted_in_the_ledger(tmp_path: Path) -> None:
    log_file = AuditLog(1 << 20, 0, prompts=False)
    log_file.start(tmp_path)
    for n in range(3):
        log_file.add(facts(n))
        log_file.flush()
    log_file.close()
    path = tmp_path / "audit-00000001.jsonl"
    path.write_bytes(path.read_bytes().replace(b'"prompt_tokens":10', b'"prompt_tokens":99', 1))

    assert audit_line(path.read_bytes().splitlines()[0]) is not None
    assert sum(sums.requests for sums in usage(tmp_path, 0).values()) == 2


@pytest.mark.parametrize("content", ["", "nonsense"])
def test_usage_in_a_damaged_file_is_counted_again_from_the_audit_log(tmp_path: Path, content: str) -> None:
    """As after a power failure, which leaves files empty that were written last."""
    days = [NOON - DAY_S, NOON]
    first = started(tmp_path)
    for n, ts in enumerate(days * 3):
        first.finished(facts(n, ts=ts))
    first.close()
    own, lost = tmp_path / "gateway-0", {f"usage-{day_text(day)}.json" for day in (DAY - 9, DAY)}
    for name in lost:
        (own / name).write_text(content)
    assert ledger_sums(tmp_path).requests == 6, "what `forebay usage` prints until a gateway starts"

    for n in (6, 7):
        again = started(tmp_path)
        again.finished(facts(n))
        again.close()
        assert {path.stem for path in own.glob("*.damaged")} == lost, "kept, but not searched for at every start"
        found = usage(own, 0)
        assert {day: sums.requests for (day, _), sums in found.items()} == {DAY - 1: 3, DAY: n - 2}
