"""`forebay scale` against a scripted API: what is sent and printed."""

import json
from typing import Any

import msgspec
import pytest
from typer.testing import CliRunner, Result

from forebay.cli.deploy.client import Admin
from forebay.cli.main import app
from forebay.cli.settings import UserError
from forebay.control.api.documents import ScalingDocument, Scalings
from forebay.control.scaling.state import DecisionRecord, Setting
from forebay.control.scaling.values import LimitUse

LOAD = DecisionRecord(1000.0, 1060.0, 2, 3, "load", "31 requests under way need 3", {"in_flight": 31.4})
SAME = DecisionRecord(1061.0, 1090.0, 3, 3, "steady", "31 requests under way need 3", {"in_flight": 31.0, "min": 1.0})
CHAT = ScalingDocument("chat", "auto", "forebay", 3, 3, 1, 8, None, 12.3, SAME, "", (LOAD, SAME))
FIXED = ScalingDocument("embed", "fixed", None, 1, 1, None, None, None, None, None, "")


class Api:
    """Answers, and what was asked."""

    def __init__(self) -> None:
        self.asked: list[tuple[str, str, object]] = []
        self.answer: object = CHAT
        self.limits: tuple[LimitUse, ...] = ()

    def raw(self, method: str, path: str, body: object = None, query: object = None, **_: object) -> bytes:
        self.asked.append((method, path, body))
        return msgspec.json.encode(Scalings((CHAT, FIXED), self.limits) if path == "/v1/scaling" else self.answer)


@pytest.fixture
def api(monkeypatch: pytest.MonkeyPatch) -> Api:
    made = Api()
    monkeypatch.setattr(Admin, "raw", lambda self, *words, **more: made.raw(*words, **more))
    monkeypatch.setenv("COLUMNS", "140")
    return made


def said(*words: str) -> Result:
    return CliRunner().invoke(app, ["scale", *words])


def shown(*words: str) -> str:
    done = said(*words)
    assert done.exit_code == 0, (done.output, done.exception)
    return done.stdout


def test_status_shows_usage_of_the_cluster_limits(api: Api) -> None:
    api.limits = (LimitUse("gpus", 7.5, 8.0), LimitUse("replicas", 20.0, 20.0))

    assert shown("status").splitlines()[-1].strip() == "limits: 7.5 of 8 GPUs, 20 of 20 replicas"
    assert json.loads(shown("status", "chat", "--json"))["limits"][1] == {"name": "replicas", "used": 20, "most": 20}


def test_status_has_a_line_for_every_model(api: Api) -> None:
    [_, chat, embed] = shown("status").splitlines()
    assert chat.split() == [
        *("chat", "auto", "(forebay)", "3", "3", "1", "to", "8", "12", "s"),
        *["steady:", "31", "requests", "under", "way", "need", "3"],
    ]
    assert embed.split() == ["embed", "fixed", "1", "1", "none", "?"]
    assert "embed" not in shown("status", "chat")
    assert json.loads(shown("status", "embed", "--json"))["models"][0]["mode"] == "fixed"
    missing = said("status", "nobody").exception
    assert isinstance(missing, UserError)
    assert "There is no model nobody; there is: chat, embed." in str(missing)


def test_explain_shows_inputs_bounds_and_recent_changes(api: Api) -> None:
    text = shown("explain", "chat")
    assert api.asked == [("GET", "/v1/scaling/chat", None)]
    for words in ("chat  auto (forebay)  3 replicas", "steady: 31 requests", "1 to 8", "12 s", "in_flight", "31"):
        assert words in text
    assert "last changes" in text
    assert "1970-01-01 00:16:40     2   3  load" in text
    assert "steady" not in text.partition("last changes")[2]
    assert "steady" in shown("explain", "chat", "--all").partition("decisions")[2]
    assert json.loads(shown("explain", "chat", "--json"))["cold_start_s"] == 12.3


@pytest.mark.parametrize(
    ("more", "words"),
    [
        ({"mode": "shadow", "wanted": 5}, "3 replicas, 5 would be wanted"),
        (
            {"mode": "set", "setting": Setting(replicas=3, by="ann", at=1000.0, why="[sale] [/all]")},
            "replicas 3 by ann at 1970-01-01 00:16:40 UTC: [sale] [/all]",
        ),
        ({"decision": None, "decisions": ()}, "No decision yet."),
        ({"mode": "fixed", "min": None, "max": None}, "It has no `scale`"),
        ({"trouble": "gone", "cold_start_s": None}, "scaling continues in memory: gone"),
        ({"replicas": 1}, "chat  auto (forebay)  1 replica\n"),
        ({"decisions": (msgspec.structs.replace(LOAD, done=False),)}, "load (shadow)"),
    ],
)
def test_explain_shows_special_states(api: Api, more: dict[str, Any], words: str) -> None:
    api.answer = {**msgspec.to_builtins(CHAT), **msgspec.to_builtins(more)}
    assert words in shown("explain", "chat")


@pytest.mark.parametrize(
    ("words", "body"),
    [
        (("set", "chat", "3", "--why", "sale"), {"replicas": 3, "why": "sale"}),
        (("set", "chat", "0"), {"replicas": 0, "why": ""}),
        (("set", "chat", "--min", "2", "--max", "9"), {"min": 2, "max": 9, "why": ""}),
        (("auto", "chat"), {"why": ""}),
    ],
)
def test_set_and_auto_send_their_options(api: Api, words: tuple[str, ...], body: dict[str, object]) -> None:
    assert "chat" in shown(*words)
    assert api.asked == [("PUT", "/v1/scaling/chat", body)]
    assert json.loads(shown(*words, "--json"))["model"] == "chat"


def test_store_outage_is_reported(api: Api) -> None:
    api.answer = {**msgspec.to_builtins(CHAT), "trouble": "gone"}
    assert "Applied, but not stored yet: gone" in shown("set", "chat", "3")


def test_set_without_values_is_an_error(api: Api) -> None:
    assert isinstance(said("set", "chat").exception, UserError)
    assert api.asked == []
