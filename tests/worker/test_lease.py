"""A worker that nobody asks for its load any more stops itself; one that is taken for another one does nothing."""

from pathlib import Path

import httpx
import pytest
from tests.worker.rig import until, worker
from tests.worker.test_faults import SLOW_STEPS, Streams, error_of

from forebay.core.model import ReplicaState

pytestmark = pytest.mark.slow
HI = {"model": "m", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 2}


def test_a_worker_lives_while_it_is_asked_and_then_ends_its_streams_and_itself(tmp_path: Path) -> None:
    with worker(tmp_path, lease_s=1.0, settings=SLOW_STEPS) as server:
        until("ready", lambda: server.load().state is ReplicaState.READY)
        clients = Streams(server, 2)
        until("both have run for longer than a lease", lambda: server.load().kv_used_tokens > 2 * 60)
        assert clients.first == 2
        assert server.process.poll() is None
        until("it has ended", lambda: server.process.poll() is not None)
        assert server.process.returncode == 1
        assert [error_of(seen) for seen in clients.done()] == ["fenced", "fenced"]
        assert "neither control nor a gateway has polled its load for 1 s" in server.log().splitlines()[-1]


def test_a_worker_refuses_what_is_meant_for_another_generation_so_that_it_goes_elsewhere(tmp_path: Path) -> None:
    with worker(tmp_path) as server:
        server.ready()

        def ask(unit: str) -> httpx.Response:
            return httpx.post(f"{server.url}/v1/chat/completions", json=HI, headers={"x-forebay-unit": unit})

        assert ask("m-0.1").status_code == 200
        for other in ("m-0.2", "m-1.1"):
            answer = ask(other)
            assert (answer.status_code, answer.headers["x-forebay-retryable"]) == (503, "1")
            assert answer.json()["error"]["code"] == "other_replica"
