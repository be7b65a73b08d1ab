"""`forebay status --watch` in a pipe: everything is there when it happens, and Ctrl-C is its usual end."""

from collections.abc import Callable
from dataclasses import replace

import msgspec
import pytest
from tests.cli.deploy.test_commands import Answer, Api, api, run
from tests.cli.view.test_table import cluster

from forebay.cli.view import status
from forebay.control.status import Status

__all__ = ["api"]

DOWN: Answer = (503, {"error": {"message": "No.", "code": "store_unavailable"}})


def looking(times: int) -> Callable[[float], None]:
    """A sleep that is interrupted by Ctrl-C after so many."""
    looks = iter(range(times))

    def sleep(seconds: float) -> None:
        if next(looks, None) is None:
            raise KeyboardInterrupt

    return sleep


def test_watched_status_is_printed_after_every_change(api: Api, monkeypatch: pytest.MonkeyPatch) -> None:
    other = replace(cluster(), ready=False, phase="drain")
    api.answers["GET /v1/status"] = [(200, cluster()), (200, cluster()), DOWN, (200, other)]
    monkeypatch.setattr(status.time, "sleep", looking(3))
    done = run("status", "--watch")

    assert done.exit_code == 0
    heads = [line for line in done.stdout.splitlines() if line.startswith(("prod", "No."))]
    assert heads == [
        "prod  ready  http://127.0.0.1:8080",
        "No. [store_unavailable] (HTTP 503)",
        "prod  not ready (drain)  http://127.0.0.1:8080",
    ]


def test_watched_status_as_json_is_a_line_per_look(api: Api, monkeypatch: pytest.MonkeyPatch) -> None:
    api.answers["GET /v1/status"] = [(200, cluster()), DOWN, (200, cluster())]
    monkeypatch.setattr(status.time, "sleep", looking(2))
    done = run("status", "--watch", "--json")

    assert done.exit_code == 0
    assert [msgspec.json.decode(line, type=Status) for line in done.stdout.splitlines()] == [cluster(), cluster()]
    assert "store_unavailable" in done.stderr
