"""`forebay explain`, `usage` and `audit` over gateway records."""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from io import StringIO
from pathlib import Path

import msgspec
import pytest
from rich.console import Console
from tests.gateway.records.rig import line_of
from typer.testing import CliRunner

from forebay.cli.main import app
from forebay.cli.records.explain import explain
from forebay.cli.records.reading import RecordFiles
from forebay.cli.records.usage import COLUMNS, view
from forebay.cli.settings import UserError
from forebay.control.api.recorded import UsageRow
from forebay.core.model import RecordsSpec
from forebay.core.routing import BATCH, INTERACTIVE, Meter, PrefixIndex, Pricing, ReplicaView, RoutingRequest, Weights
from forebay.core.routing.cpr import scores
from forebay.gateway.records.facts import Facts, Used
from forebay.gateway.records.recorder import Recorder
from forebay.gateway.records.saved import DAY_S, day_text
from forebay.gateway.records.writer import RecordLog, numbered
from forebay.obs import log
from forebay.obs.clock import wall_s
from forebay.wire.records import Attempt, Decision, packed

CANDIDATES = packed(
    [
        ["chat-0", 3, "ready", 2, 10, 0.012, 0.21, 0.034, 0.45, 0.0056, 1.5, 0.78, 128.0],
        ["chat-1", 4, "degraded", 9, 11, 0.6, 0.7, 0.08, 0.9, 0.001, 1.0, 2.3, 0.0],
    ]
)
ATTEMPTS = (Attempt("chat-1", "least score", "connect", 0.002), Attempt("chat-0", "the only one", "ok", 0.5))


@dataclass(frozen=True)
class Done:
    """What a command said."""

    returncode: int
    stdout: str
    stderr: str


Run = Callable[..., Done]


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Run:
    """Runs `forebay` in this process: the commands are many, and start nothing."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("FOREBAY_HOME", raising=False)

    def run_cli(*words: str) -> Done:
        result = CliRunner().invoke(app, words)
        if isinstance(result.exception, UserError):
            return Done(result.exception.exit_code, result.stdout, str(result.exception))
        assert result.exception is None or isinstance(result.exception, SystemExit)
        return Done(result.exit_code, result.stdout, result.stderr)

    return run_cli


def decided(request_id: str, code: str = "ok", tenant: str = "acme", ts: float | None = None) -> Decision:
    ts = wall_s() if ts is None else ts
    return Decision(
        ts, request_id, "chat", tenant, 200, code, 0.512, "cpr", "least score", CANDIDATES, 62, "chat-0", ATTEMPTS,
        0.001, 0.1, 123, 45, 64, code == "client_closed", 1, 0.05,
    )  # fmt: skip


def keep(root: Path, gateway: str, *decisions: Decision) -> None:
    """Let a gateway write records, each as a batch, and stop."""
    records = Recorder(RecordsSpec(str(root)), gateway, log.configure(StringIO()))
    assert records.start()
    for decision in decisions:
        tokens = (decision.prompt_tokens, decision.completion_tokens, decision.cached_tokens)
        spent = Used(*tokens, estimated=decision.estimated)
        line = line_of(decision)
        records.finished(Facts(decision, line, spent, revision="r-0123abcd", key="key-1", client="127.0.0.1"))
        records.flush(0.0)
    records.close()


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """Records of a cluster with two gateways."""
    root = tmp_path / ".forebay/run/demo/records"
    keep(root, "gateway-0", decided("req-1"), decided("req-2", tenant="[red]umbra"))
    keep(root, "gateway-1", decided("req-3", code="client_closed"), decided("req-4", ts=wall_s() - 3 * DAY_S))
    return root


@pytest.mark.parametrize("command", ["explain", "usage", "audit verify", "audit tail"])
def test_every_record_command_has_help(run: Run, command: str) -> None:
    done = run(*command.split(), "--help")

    assert done.returncode == 0
    assert "Usage:" in done.stdout


@pytest.mark.usefixtures("root")
def test_explain_shows_every_term_the_attempts_and_the_outcome(run: Run) -> None:
    done = run("explain", "req-1")

    assert done.returncode == 0
    for words in (
        "ok (200) after 512 ms", "tenant acme", "chat-0: least score (cpr)", "gateway-0", "queued 1 ms",
        "first token 100 ms", "123 prompt (64 cached), 45 completion", "resumed   1 times", "and 62 more", "degraded",
        "12 ms", "210 ms", "34 ms", "450 ms", "5.6 ms", "1.5x", "780 ms", "2.3 s", "128", "2/10", "9/11", "connect",
    ):  # fmt: skip
        assert words in done.stdout, words
    assert "→  chat-0" in done.stdout
    assert "counted by the gateway" in run("explain", "req-3").stdout


@pytest.mark.parametrize("width", [60, 80, 200])
def test_explain_cuts_no_figure_off_on_a_narrow_terminal(root: Path, width: int) -> None:
    console = Console(width=width, file=StringIO())
    explain(RecordFiles(root), "req-1", False, console)
    assert isinstance(console.file, StringIO)
    shown = console.file.getvalue()

    assert "→  chat-0" in shown
    assert all(words in shown for words in ("degraded", "210 ms", "450 ms", "5.6 ms", "1.5x", "780 ms", "2.3 s"))
    assert "…" not in shown


@pytest.mark.parametrize(("attempts", "queued"), [(ATTEMPTS, "queued 0 ms,"), ((), "queued -,")])
def test_explain_distinguishes_no_wait_from_an_unfinished_one(
    run: Run, root: Path, attempts: tuple[Attempt, ...], queued: str
) -> None:
    keep(root, "gateway-2", msgspec.structs.replace(decided("req-5"), queued_s=0.0, attempts=attempts))

    assert queued in run("explain", "req-5").stdout


@pytest.mark.parametrize(
    ("seconds", "shown"), [(0.9996, "1 s"), (0.9994, "999 ms"), (999.7, "1000 s"), (5025.0, "5025 s")]
)
def test_explain_writes_out_times_of_any_length(run: Run, root: Path, seconds: float, shown: str) -> None:
    keep(root, "gateway-2", msgspec.structs.replace(decided("req-5"), total_s=seconds))

    assert f" after {shown}\n" in run("explain", "req-5").stdout


@pytest.mark.parametrize(
    ("weights", "formula"),
    [
        (INTERACTIVE, "total = (queue + prefill + 0.15 decode + price + kv) x handicap"),
        (BATCH, "total = (0.1 (queue + prefill) + 0.015 decode + price + kv) x handicap"),
    ],
)
def test_explain_shows_how_totals_are_calculated(run: Run, root: Path, weights: Weights, formula: str) -> None:
    pricing = Pricing(PrefixIndex())
    views = []
    for n in range(2):
        seen = ReplicaView()
        seen.load, seen.meter = n + 1, Meter(f"chat-{n}", pricing.index.join())
        seen.meter.report(500 * (n + 1), 0.3, 1)
        views.append(seen)
    scored = scores(views, [0, 1], RoutingRequest(1, 800, 90.0, (), 128, weights=weights), pricing)
    rows = packed(
        [
            [
                f"chat-{s.at}", 1, "ready", s.load, 8, s.queue_s, s.prefill_s, s.decode_s, s.price_s, s.kv_s,
                s.handicap, s.total_s, s.hit_tokens,
            ]
            for s in scored
        ]
    )  # fmt: skip
    keep(root, "gateway-2", msgspec.structs.replace(decided("req-6"), candidates=rows))

    assert formula in run("explain", "req-6").stdout


def test_explain_shows_no_total_without_scores(run: Run, root: Path) -> None:
    counted = packed([["chat-0", 3, "ready", 2, 10]])
    keep(root, "gateway-2", msgspec.structs.replace(decided("req-6"), policy="p2c", candidates=counted))

    assert "total =" not in run("explain", "req-6").stdout


@pytest.mark.usefixtures("root")
def test_explain_as_json_names_every_field(run: Run) -> None:
    [record] = json.loads(run("explain", "req-1", "--json").stdout)

    assert (record["gateway"], record["request_id"], record["chosen"]) == ("gateway-0", "req-1", "chat-0")
    assert record["candidates"][1]["price_s"] == 0.9
    assert record["attempts"][0]["outcome"] == "connect"


def test_explain_skips_damaged_records_and_reports_them_if_nothing_is_found(run: Run, root: Path) -> None:
    path = numbered(root / "gateway-0", RecordLog.STEM, RecordLog.SUFFIX)[0][1]
    path.write_bytes(path.read_bytes().replace(b"acme", b"evil"))

    assert run("explain", "req-2").returncode == 0
    lost = run("explain", "req-1")
    assert lost.returncode == 1
    assert "There is no record of req-1" in lost.stderr
    assert "if gateway.records.decisions is on" in lost.stderr
    assert "1 damaged" in lost.stderr
    assert "damaged" not in run("explain", "nobody").stderr


def test_narrow_terminal_hides_columns_that_are_zero() -> None:
    used = [UsageRow("2026-01-31", "", "chat", "ok", 2, 1234, 0, 0, 0)]

    def columns(narrow: bool) -> list[str]:
        return [str(column.header) for column in view(used, narrow).columns]

    assert columns(narrow=True) == ["tenant", "model", "requests", "ok", "prompt"]
    assert columns(narrow=False) == list(COLUMNS)


@pytest.mark.usefixtures("root")
def test_usage_adds_up_all_gateways(run: Run) -> None:
    done = run("usage")
    rows = [line.split() for line in done.stdout.splitlines()]

    assert rows[0] == [
        "tenant", "model", "requests", "ok", "cancelled", "failed", "refused", "prompt", "cached", "completion",
        "estimated",
    ]  # fmt: skip
    assert rows[1:] == [
        ["[red]umbra", "chat", "1", "1", "0", "0", "0", "123", "64", "45", "0"],
        ["acme", "chat", "3", "2", "1", "0", "0", "369", "192", "135", "1"],
    ]


@pytest.mark.parametrize(
    ("words", "requests"),
    [
        ((), 4),
        (("--tenant", "acme"), 3),
        (("--tenant", "nobody"), 0),
        (("--model", "chat"), 4),
        (("--model", "embed"), 0),
        (("--since", "2d"), 3),
        (("--since", "7d"), 4),
        (("--since", "2020-01-31"), 4),
    ],
)
@pytest.mark.usefixtures("root")
def test_usage_can_be_filtered(run: Run, words: tuple[str, ...], requests: int) -> None:
    rows = json.loads(run("usage", "--json", *words).stdout)

    assert sum(row["requests"] for row in rows) == requests
    assert {row["day"] for row in rows} <= {day_text(int(wall_s() // DAY_S) - days) for days in (0, 1, 3, 4)}


def test_intact_audit_log_passes_and_modified_one_fails_with_the_position(run: Run, root: Path) -> None:
    good = run("audit", "verify")
    assert good.returncode == 0
    assert "No line was changed or removed" in good.stdout
    head = json.loads((root / "gateway-0/audit.head").read_bytes())
    assert f"head 2 {head['hash']}" in good.stdout, "to be kept elsewhere"

    path = root / "gateway-0/audit-00000001.jsonl"
    path.write_bytes(path.read_bytes().replace(b"acme", b"evil"))
    (root / "gateway-1/audit-00000001.jsonl").unlink()
    bad = run("audit", "verify")
    assert bad.returncode == 1
    assert "audit-00000001.jsonl:1: changed" in bad.stdout
    assert "the end: missing: lines 1 to 3" in bad.stdout
    told = run("audit", "verify", "--json")
    assert told.returncode == 1
    report = json.loads(told.stdout)
    assert not report["ok"]
    assert report["chains"][0]["files"][0]["flaws"][0]["line"] == 1
    assert report["chains"][1]["flaws"][0]["kind"] == "missing"


def test_lost_lines_and_moved_files_are_reported(run: Run, root: Path) -> None:
    path = root / "gateway-0/audit-00000001.jsonl"
    with path.open("ab") as file:
        file.write(b'{"half a li')
    assert "the last 11 bytes are not sealed yet" in run("audit", "verify").stdout
    keep(root, "gateway-0", decided("req-5"))
    assert "1 lost, according to the log itself: an unfinished line" in run("audit", "verify").stdout
    lines = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(b"".join(lines[2:]))

    missing = run("audit", "verify")
    assert missing.returncode == 1
    assert "audit-00000001.jsonl:1: missing: line 1 of the chain" in missing.stdout
    assert run("audit", "verify", "--archived").returncode == 0


def test_possible_losses_of_a_killed_gateway_are_reported(run: Run, root: Path) -> None:
    head = root / "gateway-0/audit.head"
    head.write_bytes(head.read_bytes().replace(b'"open":false', b'"open":true'))
    keep(root, "gateway-0", decided("req-5"))
    done = run("audit", "verify")

    assert done.returncode == 0
    assert "some may be lost, according to the log itself: the gateway was killed" in done.stdout


def test_deleted_log_is_detected_from_its_folder_and_other_gateways(run: Run, root: Path) -> None:
    for path in (root / "gateway-0").glob("audit*"):
        path.unlink()
    done = run("audit", "verify")
    assert done.returncode == 1
    assert "the log: missing: the whole log is gone: 2 lines of it were counted" in done.stdout

    for path in (root / "gateway-0").iterdir():
        path.unlink()
    (root / "gateway-0").rmdir()
    done = run("audit", "verify")
    assert done.returncode == 1
    assert "the whole log is gone: the chain gateway-1 has seen line 2 of it" in " ".join(done.stdout.split())
    assert run("audit", "verify", "--archived").returncode == 0


def test_the_tail_shows_the_newest_lines_of_all_gateways_without_control_characters(run: Run, root: Path) -> None:
    keep(root, "gateway-0", decided("req-9", tenant="\x1b[2Jevil"))
    done = run("audit", "tail", "-n", "2")
    lines = done.stdout.splitlines()

    assert len(lines) == 3
    assert "req-9" in lines[2]
    assert "\x1b" not in done.stdout
    raw = run("audit", "tail", "--json").stdout.splitlines()
    assert len(raw) == 5
    assert json.loads(raw[0])["request_id"] == "req-4", "sorted by time"


def test_malformed_lines_do_not_stop_the_tail(run: Run, root: Path) -> None:
    path = root / "gateway-0/audit-00000001.jsonl"
    first = path.read_bytes().splitlines()[0]
    odd = first.replace(b'"ts":', b'"ts":9e99,"was":')
    path.write_bytes(b"nonsense\n" + odd + b"\n")

    done = run("audit", "tail", "--folder", str(root))
    assert done.returncode == 0
    assert len(done.stdout.splitlines()) == 4


@pytest.mark.parametrize(
    ("words", "says", "code"),
    [
        (("usage", "--since", "long ago"), "such as 7d", 2),
        (("usage", "--since", "2026-02-31"), "such as 7d", 2),
        (("usage", "--folder", "nowhere"), "no such folder", 1),
        (("explain", "req-0"), "no record of req-0", 1),
        (("explain",), "Missing argument", 2),
        (("usage", "--folder", ".", "-f", "forebay.yaml"), "--folder names files of this machine", 2),
        (("usage", "--folder", ".", "--url", "http://127.0.0.1:1"), "--folder names files of this machine", 2),
        (("usage", "--url", "http://127.0.0.1:1"), "No cluster runs at", 3),
    ],
)
@pytest.mark.usefixtures("root")
def test_errors_have_a_message(run: Run, words: tuple[str, ...], says: str, code: int) -> None:
    done = run(*words)

    assert done.returncode == code
    assert says in done.stderr


def test_cluster_is_that_of_the_file_or_the_only_one(run: Run, tmp_path: Path, root: Path) -> None:
    other = tmp_path / ".forebay/run/other/records"
    keep(other, "gateway-0", decided("req-7"))
    several = run("usage")
    assert several.returncode == 1
    assert "--folder" in several.stderr
    assert str(root) in several.stderr
    assert run("explain", "req-7", "--folder", str(other)).returncode == 0

    synthetic = "models: [{name: chat, task: chat, source: x, engine: synthetic}]\n"
    (tmp_path / "forebay.yaml").write_text(f"name: other\n{synthetic}")
    assert run("explain", "req-7").returncode == 0
    (tmp_path / "another.yaml").write_text(f"name: demo\n{synthetic}")
    assert run("explain", "req-1", "-f", "another.yaml").returncode == 0
    (tmp_path / "forebay.yaml").write_text(f"name: third\n{synthetic}")
    assert "no records" in run("usage").stderr


def test_missing_records_or_audit_log_is_an_error(run: Run, tmp_path: Path) -> None:
    assert "There are no records" in run("audit", "verify").stderr
    folder = tmp_path / ".forebay/run/demo/records/gateway-0"
    folder.mkdir(parents=True)
    for command in ("verify", "tail"):
        done = run("audit", command)
        assert done.returncode == 1
        assert "There is no audit log" in done.stderr
    assert run("usage").returncode == 0


@pytest.mark.parametrize("command", ["explain req-1", "usage", "audit verify", "audit tail"])
def test_unreadable_files_are_named(run: Run, root: Path, command: str) -> None:
    for name in ("decisions-00000002.log", "usage-2026-01-01.json", "audit-00000002.jsonl"):
        (root / "gateway-0" / name).mkdir()
    done = run(*command.split())

    assert done.returncode == 1
    assert "Is a directory" in done.stderr


def test_closed_pipe_ends_a_long_output_quietly(root: Path) -> None:
    """As in `forebay audit tail --json -n 1000 | head`."""
    keep(root, "gateway-2", *(decided(f"req-{n}") for n in range(100)))
    reader, writer = os.pipe()
    os.close(reader)
    words = ("audit", "tail", "--json", "-n", "100", "--folder", str(root))
    with os.fdopen(writer) as nobody:
        done = subprocess.run(
            [sys.executable, "-m", "forebay.cli.main", *words], stdout=nobody, stderr=subprocess.PIPE, check=False
        )
    assert (done.returncode, done.stderr) == (1, b"")


def test_long_lists_of_problems_are_shortened(run: Run, root: Path) -> None:
    keep(root, "gateway-2", *(decided(f"req-{n}") for n in range(110)))
    path = root / "gateway-2/audit-00000001.jsonl"
    path.write_bytes(path.read_bytes().replace(b"acme", b"evil"))

    assert "audit-00000001.jsonl: and 10 more" in run("audit", "verify").stdout


def test_tail_shows_the_problems_that_the_log_records(run: Run, root: Path) -> None:
    (root / "gateway-0/audit.head").unlink()
    keep(root, "gateway-0")

    assert "broken: no readable head" in run("audit", "tail").stdout
