"""`forebay deploy`, `rollout` and `apply` against a scripted API: what is sent and printed, and the hints."""

import json
import socket
import threading
from collections.abc import Iterator
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import msgspec
import pytest
from click.testing import Result
from rich.console import Console
from typer.testing import CliRunner

from forebay.cli.deploy import view, work
from forebay.cli.deploy.client import Admin
from forebay.cli.main import app
from forebay.cli.settings import UserError
from forebay.control.api.documents import (
    EffectDocument,
    FindingDocument,
    RolloutDocument,
    Rollouts,
    StepDocument,
    VerdictDocument,
)
from forebay.control.changes import Change, Reloaded
from forebay.core.deploy.course import Kind
from forebay.core.deploy.rollout import Phase
from forebay.core.rollout.values import Decision, Finding

ERRORS = FindingDocument("errors", "rate", Finding.OPEN, True, "0.1% beside 0.2%", 0.5, 0.9, 0.2, 1204, 3400.0)
SLOW = FindingDocument("ttft", "tail", Finding.WORSE, True, "2.1 times as large", 2.1, 0.001, 1.0, 1200, None)
VERDICT = VerdictDocument(Decision.INCONCLUSIVE, "not yet known to be fine: errors", 3400.0, 600.0, (ERRORS, SLOW))
ROLLOUT = RolloutDocument(
    id="chat:3",
    model="chat",
    stable="r-0000aaaa",
    canary="r-1111bbbb",
    kind=Kind.CANARY,
    phase=Phase.COMPARING,
    ended=False,
    step=0,
    steps=(StepDocument(0.05, 600.0), StepDocument(0.2, 1800.0)),
    share=0.05,
    paused=False,
    forced=False,
    why="r-1111bbbb gets 5%",
    since=1000.0,
    time_left_s=540.0,
    created_at=1000.0,
    created_by="ada",
    stable_ready=3,
    canary_ready=None,
    stable_wanted=3,
    canary_wanted=1,
    mirrored=0.0,
    samples=2408,
    verdict=VERDICT,
    effects=(EffectDocument("errors", "odds ratio", 0.5, 0.1, None),),
)
DONE = replace(ROLLOUT, phase=Phase.PROMOTED, ended=True, share=1.0, why="r-1111bbbb serves everything")
BACK = replace(DONE, phase=Phase.ROLLED_BACK, why="5 times server_error")

STEP = f"step {1} of 2"
Answer = tuple[int, object]


class Api:
    """Answers by method and path, the last one for ever; remembers requests."""

    def __init__(self) -> None:
        self.answers: dict[str, list[Answer]] = {}
        self.asked: list[tuple[str, str, Any, str | None]] = []
        self.url = ""

    def next(self, key: str) -> Answer:
        known = self.answers.get(key.partition("?")[0], [(404, {"error": {"message": "no", "code": "not_found"}})])
        return known.pop(0) if len(known) > 1 else known[0]


@pytest.fixture
def api(monkeypatch: pytest.MonkeyPatch) -> Iterator[Api]:
    made = Api()

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            size = int(self.headers.get("content-length") or 0)
            body = json.loads(self.rfile.read(size)) if size else None
            made.asked.append((self.command, self.path, body, self.headers.get("authorization")))
            status, answer = made.next(f"{self.command} {self.path}")
            content = msgspec.json.encode(answer)
            self.send_response(status)
            self.send_header("content-length", str(len(content)))
            self.end_headers()
            self.wfile.write(content)

        do_POST = do_GET  # noqa: N815 - the library's name

        def log_message(self, format: str, *args: object) -> None:
            """Quiet."""

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.005,))
        thread.start()
        made.url = f"http://127.0.0.1:{server.server_address[1]}"
        monkeypatch.setenv("FOREBAY_ADMIN_URL", made.url)
        monkeypatch.delenv("FOREBAY_ADMIN_TOKEN", raising=False)
        monkeypatch.setattr(work, "REFRESH_S", 0.0)
        yield made
        server.shutdown()
        thread.join()


def run(*words: str) -> Result:
    return CliRunner().invoke(app, list(words))


def refused(*words: str) -> UserError:
    done = run(*words)
    assert isinstance(done.exception, UserError), done.output
    return done.exception


DEPLOY = "POST /v1/models/chat/deploy"


def test_deploy_sends_its_options_and_prints_the_watch_command(api: Api) -> None:
    api.answers[DEPLOY] = [(200, ROLLOUT)]
    done = run("deploy", "chat", "--revision", "champion", "--plan", "ab", "--why", "faster", "--unchecked")

    assert done.exit_code == 0, done.output
    body = {"revision": "champion", "why": "faster", "unchecked": True, "plan": "ab"}
    assert api.asked == [("POST", "/v1/models/chat/deploy", body, None)]
    assert "forebay rollout status chat --watch" in done.stdout
    assert "chat:3" in done.stdout


def test_plan_file_is_validated_locally_and_sent_unchanged(api: Api, tmp_path: Path) -> None:
    api.answers[DEPLOY] = [(200, ROLLOUT)]
    plan = tmp_path / "plan.yaml"
    plan.write_text("steps: [{share: 0.1, time_s: 60}]\n")
    assert run("deploy", "chat", "-r", "r-1", "--plan", str(plan), "--json").exit_code == 0
    assert api.asked[0][2]["plan"] == plan.read_text()

    plan.write_text("steps: [{share: 2}]\n")
    said = str(refused("deploy", "chat", "-r", "r-1", "--plan", str(plan)))
    assert "line 1" in said
    assert "no rollout was started" in said
    assert len(api.asked) == 1


@pytest.mark.parametrize(("end", "code"), [(DONE, 0), (BACK, 1), (replace(DONE, phase=Phase.JUDGED), 0)])
def test_deploy_wait_exit_code_reports_the_outcome(api: Api, end: RolloutDocument, code: int) -> None:
    api.answers[DEPLOY] = [(200, replace(ROLLOUT, phase=Phase.STARTING))]
    api.answers["GET /v1/rollouts/chat:3"] = [(200, ROLLOUT), (200, ROLLOUT), (200, end)]
    done = run("deploy", "chat", "-r", "r-1", "--wait")

    assert done.exit_code == code
    assert [line.split()[1] for line in done.stdout.splitlines()] == [
        "starting",
        "comparing",
        end.phase.split("_")[0],
    ]
    assert end.why in done.stdout


DOWN = (503, {"error": {"message": "This controller is a follower.", "code": "not_leader"}})


def test_waiting_goes_on_while_the_cluster_does_not_answer(api: Api, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("forebay.cli.deploy.client.AGAIN_S", 0.0)
    api.answers[DEPLOY] = [(200, ROLLOUT)]
    api.answers["GET /v1/rollouts/chat:3"] = [DOWN, DOWN, (200, DONE)]

    assert run("deploy", "chat", "-r", "r-1", "--wait").exit_code == 0


@pytest.mark.parametrize("answer", [DOWN, (404, {"error": {"message": "no", "code": "not_found"}})])
def test_waiting_ends_with_an_error_that_says_how_to_go_on(
    api: Api, monkeypatch: pytest.MonkeyPatch, answer: Answer
) -> None:
    monkeypatch.setattr(work, "AWAY_S_MAX", 0.0)
    api.answers[DEPLOY], api.answers["GET /v1/rollouts/chat:3"] = [(200, ROLLOUT)], [answer]
    said = str(refused("deploy", "chat", "-r", "r-1", "--wait"))

    assert said.endswith("The rollout may continue: `forebay rollout status chat`.")


def test_json_output_is_only_the_outcome(api: Api) -> None:
    api.answers[DEPLOY], api.answers["GET /v1/rollouts/chat:3"] = [(200, ROLLOUT)], [(200, DONE)]
    done = run("deploy", "chat", "-r", "r-1", "--wait", "--json")

    assert msgspec.json.decode(done.stdout, type=RolloutDocument) == DONE


@pytest.mark.parametrize("command", ["pause", "resume", "promote", "abort"])
def test_rollout_commands_accept_a_model_or_an_id(api: Api, command: str) -> None:
    api.answers["GET /v1/rollouts"] = [(200, Rollouts((ROLLOUT,)))]
    api.answers[f"POST /v1/rollouts/chat:3/{command}"] = [(200, ROLLOUT)]
    for target in ("chat", "chat:3"):
        assert run("rollout", command, target, "--why", "x").exit_code == 0
    sent = ("POST", f"/v1/rollouts/chat:3/{command}", {"why": "x"}, None)

    assert api.asked == [("GET", "/v1/rollouts?model=chat&ended=false", None, None), sent, sent]


def test_error_without_a_rollout_points_to_past_ones(api: Api) -> None:
    api.answers["GET /v1/rollouts"] = [(200, Rollouts(()))]

    assert "forebay rollout history chat" in str(refused("rollout", "abort", "chat"))
    assert "forebay deploy" in run("rollout", "status").stdout
    assert "No rollout has ended" in run("rollout", "history").stdout


def test_watch_without_a_terminal_prints_a_line_per_change(api: Api, monkeypatch: pytest.MonkeyPatch) -> None:
    down: Answer = (503, {"error": {"message": "No.", "code": "store_unavailable"}})
    api.answers["GET /v1/rollouts"] = [
        (200, Rollouts((ROLLOUT,))),
        (200, Rollouts((ROLLOUT,))),
        down,
        (200, Rollouts((DONE,))),
    ]
    looks = iter(range(3))

    def sleep(seconds: float) -> None:
        if next(looks, None) is None:
            raise KeyboardInterrupt

    monkeypatch.setattr(work.clock, "sleep", sleep)
    done = run("rollout", "status", "--watch")

    assert done.exit_code == 0
    assert done.stdout.splitlines() == [view.line(ROLLOUT), "No. [store_unavailable] (HTTP 503)", view.line(DONE)]

    api.answers["GET /v1/rollouts"] = [(200, Rollouts((ROLLOUT,))), down, (200, Rollouts((DONE,)))]
    looks = iter(range(2))
    done = run("rollout", "status", "--watch", "--json")

    assert done.exit_code == 0
    shown = [msgspec.json.decode(line, type=Rollouts).rollouts for line in done.stdout.splitlines()]
    assert shown == [(ROLLOUT,), (DONE,)]
    assert "store_unavailable" in done.stderr


def test_rollout_status_and_history_are_shown(api: Api) -> None:
    api.answers["GET /v1/rollouts"] = [(200, Rollouts((ROLLOUT, BACK)))]

    assert f"comparing, {STEP}, 9 min left" in run("rollout", "status", "chat").stdout
    assert "rolled back" in run("rollout", "history", "chat", "--last", "5").stdout
    assert [asked[1] for asked in api.asked] == [
        "/v1/rollouts?model=chat",
        "/v1/rollouts?ended=true&last=5&model=chat",
    ]
    shown = msgspec.json.decode(run("rollout", "status", "--json").stdout, type=Rollouts)
    assert shown == Rollouts((ROLLOUT, BACK))
    assert run("rollout", "history", "--json").exit_code == 0


def test_apply_shows_the_changes_and_their_effects(api: Api, tmp_path: Path) -> None:
    file = tmp_path / "forebay.yaml"
    file.write_text("name: x\n")
    changes = (Change("a", "1", "2"), Change("b", "nothing", "3"), Change("c", "4", "nothing"))
    api.answers["POST /v1/apply"] = [(200, Reloaded((), changes, ("chat: 1 replica more",))), (200, Reloaded())]
    dry = run("apply", "-f", str(file), "--dry-run").stdout.splitlines()

    assert dry[:4] == ["~ a: 1 → 2", "+ b: 3", "- c: 4", "would follow: chat: 1 replica more"]
    assert "dry run" in dry[4]
    assert run("apply", "-f", str(file)).stdout == "Nothing to change.\n"
    assert json.loads(run("apply", "-f", str(file), "--json").stdout) == {
        "problems": [],
        "changes": [],
        "effects": [],
    }
    assert [asked[2] for asked in api.asked[:2]] == [
        {"document": "name: x\n", "dry_run": True},
        {"document": "name: x\n", "dry_run": False},
    ]


def test_rejected_file_prints_all_its_problems(api: Api, tmp_path: Path) -> None:
    file = tmp_path / "forebay.yaml"
    file.write_text("name: x\n")
    api.answers["POST /v1/apply"] = [(422, Reloaded(("what was sent: 1 problem", "   line 1  bad")))]

    assert str(refused("apply", "-f", str(file))) == "what was sent: 1 problem\n   line 1  bad"
    assert run("apply", "-f", str(file), "--json").exit_code == 1
    file.write_bytes(b"\xff")
    assert "UTF-8" in str(refused("apply", "-f", str(file)))


def test_key_comes_from_a_file_or_the_environment(api: Api, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    api.answers["GET /v1/rollouts"] = [(200, Rollouts(()))]
    monkeypatch.setenv("FOREBAY_ADMIN_TOKEN", "fb-environment")
    (tmp_path / "token").write_text("fb-file\n")
    run("rollout", "status")
    run("rollout", "status", "--token-file", str(tmp_path / "token"))

    assert [asked[3] for asked in api.asked] == ["Bearer fb-environment", "Bearer fb-file"]
    (tmp_path / "token").write_text("\n")
    assert "keys create" in str(refused("rollout", "status", "--token-file", str(tmp_path / "token")))
    (tmp_path / "token").write_bytes(b"\xff")
    assert "not a text file" in str(refused("rollout", "status", "--token-file", str(tmp_path / "token")))
    assert "cannot be read" in str(refused("rollout", "status", "--token-file", str(tmp_path / "none")))


@pytest.mark.parametrize(
    ("status", "code", "key", "says"),
    [
        (401, "invalid_api_key", "", "No key was sent"),
        (401, "invalid_api_key", "fb-x", "not valid"),
        (403, "role_not_allowed", "", "only the account that runs the cluster"),
        (403, "role_not_allowed", "fb-x", "[role_not_allowed]"),
        (409, "conflict", "", "[conflict] (HTTP 409)"),
    ],
)
def test_rejection_says_what_to_do_next(
    api: Api, monkeypatch: pytest.MonkeyPatch, *, status: int, code: str, key: str, says: str
) -> None:
    api.answers[DEPLOY] = [(status, {"error": {"message": "No.", "code": code}})]
    monkeypatch.setenv("FOREBAY_ADMIN_TOKEN", key)
    error = refused("deploy", "chat", "-r", "r-1")

    assert str(error).startswith("No.")
    assert says in str(error)
    assert error.exit_code == 1


@pytest.mark.parametrize(("status", "answer"), [(200, {"hello": 1}), (404, "page"), (500, [])])
def test_other_server_at_the_address_is_recognized(api: Api, status: int, answer: object) -> None:
    api.answers["GET /v1/rollouts"] = [(status, answer)]
    error = refused("rollout", "status")

    assert "does not answer like the admin API" in str(error)
    assert error.exit_code == 3


@pytest.mark.parametrize("url", ["http://127.0.0.1:80x81", "http://[::1", "ftp://127.0.0.1"])
def test_unusable_url_is_a_usage_error(url: str) -> None:
    error = refused("rollout", "status", "--url", url)

    assert str(error).startswith(f"--url: found '{url}'")
    assert error.exit_code == 2


def test_url_may_lack_the_scheme(api: Api) -> None:
    api.answers["GET /v1/rollouts"] = [(200, Rollouts(()))]

    assert run("rollout", "status", "--url", api.url.removeprefix("http://")).exit_code == 0


def test_key_that_no_header_can_hold_is_a_usage_error(
    api: Api, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "token").write_text("fb-one\nfb-two\n")
    said = str(refused("rollout", "status", "--token-file", str(tmp_path / "token")))
    assert said.startswith("--token-file: found a character")

    monkeypatch.setenv("FOREBAY_ADMIN_TOKEN", "ключ")
    error = refused("rollout", "status")
    assert str(error).startswith("FOREBAY_ADMIN_TOKEN: found a character")
    assert error.exit_code == 2


def test_hanging_cluster_is_not_taken_for_another_version() -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        admin = Admin(f"127.0.0.1:{silent.getsockname()[1]}")
        with pytest.raises(UserError, match="did not answer in time") as raised:
            admin.raw("GET", "/v1/rollouts", timeout_s=0.05)

    assert raised.value.exit_code == 3


def test_missing_cluster_or_plan_is_an_error(api: Api) -> None:
    assert refused("rollout", "status", "--url", "http://127.0.0.1:9").exit_code == 3
    assert "canary, blue-green, shadow, ab" in str(refused("deploy", "chat", "-r", "r-1", "--plan", "canry"))


def shown(it: RolloutDocument, columns: int) -> str:
    console = Console(width=columns, record=True, force_terminal=False)
    with console.capture() as captured:
        console.print(view.block(it))
    return captured.get()


@pytest.mark.parametrize("columns", [80, 120])
def test_rollout_view_fits_a_terminal_with_progress_and_missing_conditions(columns: int) -> None:
    text = shown(ROLLOUT, columns)

    assert all(len(line) <= columns for line in text.splitlines())
    words = (
        f"chat:3  canary  r-0000aaaa → r-1111bbbb  comparing, {STEP}, 9 min left",
        "5% of the traffic",
        "ready replicas: r-1111bbbb ? of 1, r-0000aaaa 3 of 3",
        "worse",
        "1,204",
        "3,400 more requests to r-1111bbbb are needed, about 10 min",
        "by ada; 2,408 requests compared",
    )
    assert [each for each in words if each not in text] == []
    assert "…" not in text


def test_rollout_view_depends_on_kind_and_phase() -> None:
    assert "paused" in shown(replace(ROLLOUT, paused=True, time_left_s=None), 120)
    assert "are copied to it" in shown(replace(ROLLOUT, kind=Kind.SHADOW, mirrored=0.2, share=0.0), 120)
    nothing = replace(VERDICT, findings=(replace(ERRORS, canary_samples=0),))
    starting = shown(replace(ROLLOUT, phase=Phase.STARTING, samples=0, verdict=nothing), 120)
    assert "starting, 9 min left" in starting
    assert "odds" not in starting
    assert "0.1% beside" not in starting
    golden_only = shown(replace(ROLLOUT, samples=0), 120)  # answers to golden questions are no requests
    assert "0.1% beside" in golden_only
    assert "3,400 more requests" in golden_only
    ab = shown(replace(ROLLOUT, kind=Kind.AB, phase=Phase.JUDGED, ended=True), 120)
    assert ab.splitlines()[2].split() == ["metric", "effect", "estimate", "from", "to"]
    assert ab.splitlines()[3].split() == ["errors", "odds", "ratio", "0.500", "0.100", "?"]
    assert "ready replicas" not in shown(DONE, 120)
    assert "inconclusive" not in shown(DONE, 120)


@pytest.mark.parametrize(
    ("seconds", "words"),
    [(None, "?"), (0, "0 s"), (119.4, "119 s"), (120, "2 min"), (7200, "2 h"), (172_800, "2 d")],
)
def test_times_are_shown_in_a_fitting_unit(seconds: float | None, words: str) -> None:
    assert view.span(seconds) == words


def test_ctrl_c_while_watching_leaves_the_rollout_running(api: Api, monkeypatch: pytest.MonkeyPatch) -> None:
    api.answers[DEPLOY] = [(200, ROLLOUT)]

    def interrupted(seconds: float) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(work.clock, "sleep", interrupted)
    done = run("deploy", "chat", "-r", "r-1", "--wait")

    assert done.exit_code == 130
    assert "The rollout continues" in done.stdout
