"""Reloading the cluster file: what takes effect, what is rejected as a whole, and what `forebay reload` prints."""

import asyncio
import json
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import msgspec
import pytest
from rich.console import Console
from tests.cli.conftest import Run
from tests.control.rig import Rig, controlled
from tests.control.units import kill_all

from forebay.cli.deploy.client import Admin
from forebay.cli.registry.artifacts import prepare_models
from forebay.cli.reload import NO_FILE, Reloader
from forebay.cli.settings import FileText, UserError, parse_cluster
from forebay.cli.view.reload import reload
from forebay.control.changes import Change, Reloaded
from forebay.control.plan import Places, Plan, make_plan
from forebay.core.cluster import Cluster

TEST_S = 60
MODEL = {"name": "chat", "task": "chat", "source": "x", "engine": "synthetic"}


def document(**more: Any) -> bytes:
    return json.dumps({"gateway": {"port": 18080}, "models": [{**MODEL, **more}]}).encode()


def parse(text: bytes) -> Cluster:
    return parse_cluster(FileText("f.yaml", text), {}, otherwise="nothing was changed")


def quiet(stage: str, done: int, total: int | None) -> None:
    """Progress of which nobody is told."""


class Bed:
    """A running control, and a file that can change."""

    def __init__(self, rig: Rig, first: Cluster) -> None:
        self.rig = rig
        self.text = document()
        self.again = Reloader(rig.control, rig.journal, first, self.plan(first), lambda: parse(self.text), self.plan)

    def plan(self, cluster: Cluster) -> Plan:
        return make_plan(cluster, prepare_models(cluster, Path(), lambda _: quiet), Places(self.rig.folder), "1")


def on_a_bed(folder: Path, test: Callable[[Bed], Any]) -> None:
    async def bounded() -> None:
        first = parse(document())
        plan = make_plan(first, prepare_models(first, Path(), lambda _: quiet), Places(folder), "1")
        async with asyncio.timeout(TEST_S), controlled(folder, plan) as rig:
            await test(Bed(rig, first))

    try:
        asyncio.run(bounded())
    finally:
        kill_all(folder)


def test_changed_file_is_in_effect_before_the_response(tmp_path: Path) -> None:
    async def test(bed: Bed) -> None:
        bed.text = document(routing="round_robin")
        done = await bed.again()

        assert done == Reloaded(
            (),
            (Change("models.chat.routing", '"cpr"', '"round_robin"'),),
            ("the gateways apply it within a second",),
        )
        assert bed.rig.snapshot().models[0].policy == "round_robin"
        assert await bed.again() == Reloaded()
        assert [(e.kind, e.why) for e in bed.rig.events() if e.kind == "reloaded"] == [
            ("reloaded", "\n".join(map(str, [*done.changes, *done.effects]))),
            ("reloaded", "nothing has changed"),
        ]

    on_a_bed(tmp_path, test)


@pytest.mark.parametrize(
    ("text", "problems"),
    [
        (b"models: [", ["f.yaml: 1 problem; nothing was changed.", "a syntax error"]),
        (document(replicas=0, queue_max=-1), ["2 problems; nothing was changed.", "replicas", "queue_max"]),
        (
            document().replace(b"18080", b"18081"),
            ["gateway.port: 18080 → 18081 needs a restart of forebay up", "Nothing was changed."],
        ),
        (document(engine="llamacpp", source="./none.gguf"), ["model chat: ", "none.gguf"]),
    ],
)
def test_invalid_file_changes_nothing(tmp_path: Path, text: bytes, problems: list[str]) -> None:
    async def test(bed: Bed) -> None:
        plan = bed.rig.control.plan
        bed.text = text
        done = await bed.again()

        said = "\n".join(done.problems)
        assert [problem for problem in problems if problem not in said] == []
        assert (done.changes, done.effects) == ((), ())
        assert bed.rig.control.plan == plan
        assert [e.why for e in bed.rig.events() if e.kind == "not_reloaded"] == [said]
        bed.text = document()
        assert await bed.again() == Reloaded()

    on_a_bed(tmp_path, test)


def test_missing_file_internal_error_and_shutdown_change_nothing(tmp_path: Path) -> None:
    async def test(bed: Bed) -> None:
        bed.again.read = None
        assert await bed.again() == Reloaded((NO_FILE,))
        bed.again.read = lambda: 1 // 0  # type: ignore[assignment, return-value]
        [problem] = (await bed.again()).problems
        assert problem.startswith("nothing was changed: ZeroDivisionError")
        bed.again.read = lambda: parse(document(replicas=2))
        bed.rig.control.stop()
        assert await bed.again() == Reloaded(("the cluster is stopping",))

    on_a_bed(tmp_path, test)


@contextmanager
def admin(status: int, body: bytes) -> Iterator[str]:
    """An admin API that always answers the same."""

    class Answer(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            self.send_response(status)
            self.send_header("content-length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format: str, *args: object) -> None:
            """Quiet."""

    with ThreadingHTTPServer(("127.0.0.1", 0), Answer) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{server.server_address[1]}"
        server.shutdown()
        thread.join()


def test_command_prints_changes_and_their_effects(capsys: pytest.CaptureFixture[str]) -> None:
    done = Reloaded((), (Change("models.chat.replicas", "2", "3"),), ("chat: 1 replica more",))
    with admin(200, msgspec.json.encode(done)) as url:
        assert reload(Admin(url), Console()) == 0
    assert capsys.readouterr().out == "models.chat.replicas: 2 → 3\nchat: 1 replica more\n"
    with admin(200, msgspec.json.encode(Reloaded())) as url:
        assert reload(Admin(url), Console()) == 0
    assert capsys.readouterr().out == "nothing has changed\n"


@pytest.mark.parametrize(
    ("status", "body", "said", "code"),
    [
        (
            422,
            msgspec.json.encode(Reloaded(("f.yaml: 1 problem", "line 3  bad"))),
            "f.yaml: 1 problem\nline 3  bad",
            1,
        ),
        (404, b"{}", "does not answer like the admin API", 3),
        (200, b"<html>", "does not answer like the admin API", 3),
    ],
)
def test_command_fails_with_all_problems(status: int, body: bytes, said: str, code: int) -> None:
    with admin(status, body) as url, pytest.raises(UserError) as raised:
        reload(Admin(url), Console())
    assert said in str(raised.value)
    assert raised.value.exit_code == code


@pytest.mark.slow
def test_command_without_a_cluster_is_an_error(run: Run) -> None:
    done = run("reload", "--url", "http://127.0.0.1:9")

    assert (done.returncode, "No cluster runs at http://127.0.0.1:9" in done.stderr) == (3, True)
