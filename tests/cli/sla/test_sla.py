"""`forebay sla`: which gateway records are read, and how results are shown."""

from io import StringIO
from pathlib import Path

import pytest
from rich.console import Console
from tests.cli.records.test_records import decided, keep

from forebay.cli.settings import UserError
from forebay.cli.sla import delivered as module
from forebay.cli.sla.command import seconds
from forebay.cli.sla.delivered import delivered
from forebay.cli.sla.view import share, span, view
from forebay.control.standby.sla import ModelSla, PromiseDocument, Sla
from forebay.core.availability.budget import ObjectiveResult, Requests, budget
from forebay.core.availability.history import AvailabilitySums, Gap, Incident, IncidentKind
from forebay.core.cluster import Slo

DAY_S = 86_400
NOW = 20_000 * DAY_S + 40_000.0
PROMISES = Slo(ttft_p99_ms=50, latency_p99_ms=600, tpot_p99_ms=20)


def test_outcomes_come_from_the_ledgers_and_times_from_the_decisions(tmp_path: Path) -> None:
    codes = ("ok", "ok", "ok", "client_closed", "invalid_json", "queue_full", "engine_failed")
    keep(tmp_path, "gateway-0", *(decided(f"r-{i}", code, ts=NOW - 60 + i) for i, code in enumerate(codes)))
    keep(tmp_path, "gateway-1", decided("old", ts=NOW - 5 * DAY_S), decided("late", ts=NOW - 10))
    found = delivered(tmp_path, NOW - DAY_S, NOW, {"chat": PROMISES})["chat"]

    assert found.requests == Requests(19_999.0 * DAY_S, NOW, ok=4, failed=2, refused=1, cancelled=1)
    assert found.requests.share == 4 / 6
    kept = {each.promise: each for each in found.kept}
    assert {name: (each.requests, each.kept) for name, each in kept.items()} == {
        "ttft": (4, 0),
        "tpot": (4, 4),
        "latency": (4, 4),
    }
    assert (kept["ttft"].since, kept["ttft"].p99_s) == (NOW - 60, 0.1)
    assert delivered(tmp_path, NOW - DAY_S, NOW, {"chat": Slo()})["chat"].kept == ()
    assert delivered(tmp_path / "none", NOW - DAY_S, NOW, {"chat": PROMISES}) == {}


def test_newest_decision_files_are_read_within_the_limit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for gateway in range(3):
        keep(tmp_path, f"gateway-{gateway}", decided("r", ts=NOW - 10))
    monkeypatch.setattr(module, "READ_BYTES_MAX", 1)
    found = delivered(tmp_path, NOW - DAY_S, NOW, {"chat": PROMISES})["chat"]

    assert found.requests.ok == 3
    assert found.kept[0].requests == 1


def test_decision_file_that_is_removed_meanwhile_is_left_out(tmp_path: Path) -> None:
    keep(tmp_path, "gateway-0", decided("r", ts=NOW - 10))
    (tmp_path / "gateway-0" / "decisions-00000000.log").symlink_to("removed")

    assert delivered(tmp_path, NOW - DAY_S, NOW, {"chat": PROMISES})["chat"].kept[0].requests == 1


@pytest.mark.parametrize(("text", "wanted"), [("12h", 43_200), ("30d", 2_592_000), ("1d", 86_400)])
def test_periods_are_hours_or_days(text: str, wanted: int) -> None:
    assert seconds(text) == wanted
    for wrong in ("", "d", "0d", "5m", "-1h", "1.5d"):
        with pytest.raises(UserError):
            seconds(wrong)


def test_shares_and_times_have_as_many_digits_as_needed() -> None:
    shares = (0.0, 1.0, 0.999, 0.9999996, 1 - 1e-9, 1e-9, 0.00001)
    assert [share(value) for value in shares] == [
        "0.00 %",
        "100.00 %",
        "99.90 %",
        "99.99996 %",
        "over 99.999999 %",
        "below 0.000001 %",
        "0.001 %",
    ]
    assert [span(value) for value in (0.25, 89, 2592, 86_400, 30 * DAY_S)] == [
        "0.2 s", "89.0 s", "43.2 min", "24.0 h", "30.0 d",
    ]  # fmt: skip


def shown(it: Sla) -> str:
    console = Console(file=StringIO(), width=160)
    console.print(view(it))
    assert isinstance(console.file, StringIO)
    return "\n".join(line.rstrip() for line in console.file.getvalue().splitlines())


PROMISE = PromiseDocument(
    2, 1, 1, 15 * DAY_S, 450.0, DAY_S, 1, 1, DAY_S / 4.744, 0.9996, 0.9999996, 1 - 1e-9, 1e-7, 0.9999995, 0.3, 4, 6.0,
    "one of 2 for about 0.3 s", "nothing",
)  # fmt: skip


def test_the_report_shows_objective_delivery_error_budget_and_unknown_time() -> None:
    seen, requests = AvailabilitySums(DAY_S, DAY_S - 600, DAY_S - 700), Requests(NOW - DAY_S, NOW, 9_990, 10, 3, 4)
    chat = ModelSla(
        "chat", 0.999, PROMISE, seen.known_s, 29 * DAY_S, seen.up_s, seen.down_s, seen.full_s, seen.up_s / DAY_S,
        (Gap(NOW - 30 * DAY_S, NOW - DAY_S, 29 * DAY_S),), requests, requests.share,
        budget(0.999, 30 * DAY_S, seen, requests), (ObjectiveResult("ttft", 0.5, NOW - DAY_S, 1000, 990, 0.4),),
        tuple(Incident(NOW - 500 + i, IncidentKind.FAILURE, "chat", "chat-0", "was killed", 4.5) for i in range(12)),
    )  # fmt: skip
    leader = Incident(NOW, IncidentKind.LEADER, "", "", "another control leads")
    text = shown(Sla(NOW - 30 * DAY_S, NOW, (chat,), (leader,), 3))

    for told in (
        "chat  objective 99.90 %",
        "99.31 % of the known 24.0 h; down for 10.0 min; with fewer replicas than wanted for 1.7 min",
        "9,990 of 10,000 succeeded (99.90 %)",
        "3 refused because of the client; 4 cancelled by the client",
        "33.2 min left of 43.2 min",
        "10 of 10.0 failures allowed; burn rate 1.00",
        "p99 400 ms, objective 500 ms; 99.00 % of 1,000 within it",
        "expected               99.9999 % of the time all of 2 serve, over 99.999999 % at least one, with 1 standby",
        "seen: 1 failure in 24.0 h of all replicas together",
        "2 of 3 are up for 99.99996 % (binomial tail), less 0.00001 % in which a spare steps in",
        "300 ms each time (mean of 4 seen)",
        "1 keep 99.90 % for all of 2",
        "(29.0 d)",
        "and 2 before",
        "another control leads",
        "3 further incidents",
    ):
        assert told in text, text


def test_the_report_names_missing_objectives_and_data() -> None:
    nothing = Requests(NOW - 60, NOW)
    bare = ModelSla("solo", None, PROMISE, 0, 60, 0, 0, 0, None, (), nothing, None, None, (), ())
    over = budget(0.999, 60, AvailabilitySums(60, 0, 0), Requests(NOW - 60, NOW, ok=1, failed=1))
    promise = PromiseDocument(2, 0, None, 1, 1, 0, 0, 0, 0, 0.5, 0.25, 0.75, 0, 0.25, 0.4, 0, None, "", "")
    broken = ModelSla("broken", 0.999, promise, 60, 0, 0, 60, 0, 0.0, (), None, None, over, (), ())
    text = shown(Sla(NOW - 60, NOW, (bare, broken)))

    for told in (
        "no objective is set",
        "unknown: nothing was observed",
        "none recorded",
        "0.00 % of the known 60.0 s; down for 60.0 s",
        "over by 59.9 s of 0.1 s",
        "without standby",
        "no number keeps 99.90 %",
    ):
        assert told in text, text
