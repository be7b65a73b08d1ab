"""What a worker does when its engine dies, hangs or cannot start, and when clients or the operator leave."""

import json
import os
import signal
import socket
import subprocess
import sys
import threading
from collections import Counter
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from tests.worker.rig import Worker, alive, until, worker

pytestmark = pytest.mark.slow
HI: list[Any] = [{"role": "user", "content": "hi"}]
LONG: dict[str, Any] = {"model": "m", "messages": HI, "max_tokens": 4000, "ignore_eos": True}
SLOW_STEPS = {"step_ms": 20.0}


class Streams(list[threading.Thread]):
    """Clients that stream, each in a thread of its own; `first` counts those that have seen a token."""

    def __init__(self, on: Worker, count: int, **fields: Any) -> None:
        self.first = 0
        self.results: list[list[str]] = []
        body = LONG | {"stream": True} | fields
        super().__init__(threading.Thread(target=self._run, args=(on.url, body)) for _ in range(count))
        for thread in self:
            thread.start()

    def _run(self, url: str, body: dict[str, Any]) -> None:
        seen: list[str] = []
        with httpx.stream("POST", f"{url}/v1/chat/completions", json=body, timeout=30) as answer:
            lines = answer.iter_lines()
            try:
                for line in lines:
                    if line.startswith("data: "):
                        if not seen:
                            self.first += 1
                        seen.append(line[6:])
            except httpx.RemoteProtocolError:
                seen.append("cut")
        self.results.append(seen)

    def done(self) -> list[list[str]]:
        for thread in self:
            thread.join(30)
            assert not thread.is_alive()
        return self.results


def error_of(seen: list[str]) -> str:
    """The code of the in-band error before the cut."""
    assert seen[-1] == "cut"
    return str(json.loads(seen[-2])["error"]["code"])


def test_a_killed_engine_is_replaced_and_its_requests_fail_retryably(tmp_path: Path) -> None:
    with worker(tmp_path, settings=SLOW_STEPS | {"concurrency": 2}) as w:
        w.ready()
        streams = Streams(w, 2)
        until("two running", lambda: streams.first == 2)
        unstarted: list[httpx.Response] = []
        waiting = threading.Thread(
            target=lambda: unstarted.append(httpx.post(f"{w.url}/v1/chat/completions", json=LONG, timeout=30))
        )
        waiting.start()
        until("one waiting", lambda: w.load().waiting == 1)
        old = w.signal_engine(signal.SIGKILL)
        for seen in streams.done():
            assert error_of(seen) == "engine_failed"
        waiting.join(30)
        assert unstarted[0].status_code == 503
        assert unstarted[0].json()["error"]["code"] == "engine_failed"
        assert unstarted[0].headers["x-forebay-retryable"] == "1"
        w.ready()
        load = w.idle()
        assert (load.engine_restarts, load.engine_pid != old, alive(old)) == (1, True, False)
        with w.client() as client:
            assert client.chat.completions.create(model="m", messages=HI, max_tokens=2).choices
        assert w.metric("worker_engine_restarts_total") == 1
        assert w.metric("worker_requests_total", code="engine_failed") == 3
        assert "killed by signal 9" in w.log()


def test_a_failure_reaches_the_gateway_in_a_trailer_and_keeps_its_connection(tmp_path: Path) -> None:
    body = json.dumps(LONG | {"stream": True}).encode()
    head = b"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\nx-forebay-gateway: 1\r\ncontent-length: %d\r\n\r\n"
    with worker(tmp_path, settings=SLOW_STEPS) as w:
        address = w.ready().endpoint.host, w.endpoint.port
        with socket.create_connection(address, timeout=20) as raw:
            raw.sendall(head % len(body) + body)
            answer = b""
            while b'"role"' not in answer:
                answer += raw.recv(65_536)
            w.signal_engine(signal.SIGKILL)
            while not answer.endswith(b"\r\n0\r\nx-forebay-error: engine_failed\r\n\r\n"):
                answer += raw.recv(65_536) or b"cut"
                assert not answer.endswith(b"cut")
            assert b'"error"' not in answer
            assert b"[DONE]" not in answer
            raw.sendall(b"GET /livez HTTP/1.1\r\nhost: x\r\n\r\n")
            assert raw.recv(65_536).startswith(b"HTTP/1.1 200")
        w.ready()
        bad = w.http.post(f"{w.url}/v1/chat/completions", content=b"{", headers={"x-forebay-gateway": "1"})
        assert (bad.status_code, bad.json()["error"]["code"]) == (400, "invalid_json")
        assert w.metric("worker_requests_total", code="engine_failed") == 1


def test_a_stopped_engine_is_reported_as_stalled_and_recovers_by_itself(tmp_path: Path) -> None:
    with worker(tmp_path, settings=SLOW_STEPS, engine_hang_s=16.0) as w:
        w.ready()
        streams = Streams(w, 1, max_tokens=100)
        until("running", lambda: streams.first == 1)
        pid = w.signal_engine(signal.SIGSTOP)
        try:
            until(
                "stalled",
                lambda: w.load().state == "degraded",
            )
            assert w.load().stalled_s > 0
            assert w.http.get(f"{w.url}/readyz").status_code == 503
            assert w.http.get(f"{w.url}/livez").status_code == 200
        finally:
            os.kill(pid, signal.SIGCONT)
        assert streams.done()[0][-1] == "[DONE]"
        until("ready again", lambda: w.load().state == "ready")
        assert w.load().engine_restarts == 0


def test_an_engine_that_stays_stopped_is_replaced(tmp_path: Path) -> None:
    with worker(tmp_path, settings=SLOW_STEPS, engine_hang_s=1.0) as w:
        w.ready()
        streams = Streams(w, 3)
        until("running", lambda: streams.first == 3)
        old = w.signal_engine(signal.SIGSTOP)
        for seen in streams.done():
            assert error_of(seen) == "engine_stalled"
        until("a new engine", lambda: w.load().state == "ready")
        assert not alive(old)
        assert w.idle().engine_restarts == 1


def test_an_idle_engine_that_hangs_is_noticed_too(tmp_path: Path) -> None:
    with worker(tmp_path, engine_hang_s=1.0) as w:
        old = w.ready().signal_engine(signal.SIGSTOP)
        until("replaced", lambda: w.load().engine_restarts == 1)
        w.ready()
        assert not alive(old)


def test_a_worker_that_was_stopped_itself_does_not_blame_its_engine(tmp_path: Path) -> None:
    with worker(tmp_path, engine_hang_s=1.0, settings=SLOW_STEPS) as w:
        w.ready()
        streams = Streams(w, 1, max_tokens=150)
        until("running", lambda: streams.first == 1)
        pid = w.load().engine_pid
        w.process.send_signal(signal.SIGSTOP)
        threading.Event().wait(2.5)  # longer than engine_hang_s: it is time itself that is tested
        w.process.send_signal(signal.SIGCONT)
        assert streams.done()[0][-1] == "[DONE]"
        assert (w.load().engine_pid, w.load().engine_restarts) == (pid, 0)


def test_an_engine_that_keeps_dying_makes_the_worker_give_up_with_a_reason(tmp_path: Path) -> None:
    with worker(tmp_path) as w:
        w.ready()
        for restarts in range(4):
            until("another engine", lambda n=restarts: (x := w.load()).engine_restarts == n and x.state == "ready")
            w.signal_engine(signal.SIGKILL)
        until("another engine", lambda: (x := w.load()).engine_restarts == 4 and x.state == "ready")
        w.signal_engine(signal.SIGKILL)
        assert w.process.wait(20) == 1
        last = w.log().splitlines()[-1]
        assert last == "worker m-0: the engine failed 5 times in a row: the engine process ended (killed by signal 9)"


@pytest.mark.parametrize(
    ("spec", "reason"),
    [
        ({"engine": "warp"}, "engine 'warp' does not exist"),
        ({"engine": "openvino", "artifact": "/nowhere/model.gguf"}, "/nowhere/model.gguf"),
    ],
)
def test_an_engine_that_cannot_load_ends_the_worker_with_its_reason(tmp_path: Path, spec: Any, reason: str) -> None:
    with worker(tmp_path, **spec) as w:
        assert w.process.wait(60) == 1
        last = w.log().splitlines()[-1]
        assert last.startswith("worker m-0: the engine cannot load: ")
        assert reason in last


def test_an_engine_that_loads_too_slowly_is_given_up(tmp_path: Path) -> None:
    with worker(tmp_path, engine_load_timeout_s=0.01) as w:
        assert w.process.wait(20) == 1
        assert "did not load within 0.01 s" in w.log().splitlines()[-1]


def test_a_client_that_leaves_frees_all_that_it_held(tmp_path: Path) -> None:
    with worker(tmp_path, settings=SLOW_STEPS) as w:
        w.ready()
        with httpx.stream("POST", f"{w.url}/v1/chat/completions", json=LONG | {"stream": True, "n": 4}) as answer:
            lines = answer.iter_lines()  # kept: when it is collected, httpx closes the connection
            next(lines)
            until("four running", lambda: w.load().running == 4)
            assert w.load().kv_used_tokens > 0
        w.idle()
        with pytest.raises(httpx.ReadTimeout):
            httpx.post(f"{w.url}/v1/chat/completions", json=LONG, timeout=0.3)
        w.idle()
        assert w.metric("worker_requests_total", code="client_closed") == 2


@pytest.mark.parametrize("n", [1, 3])
def test_tokens_of_a_disconnected_client_are_counted_once(tmp_path: Path, n: int) -> None:
    with worker(tmp_path, settings=SLOW_STEPS) as w:
        w.ready()
        prompt = w.http.post(f"{w.url}/v1/chat/completions", json=LONG | {"max_tokens": 1}).json()["usage"][
            "prompt_tokens"
        ]
        for stream in (True, False):
            before = w.metric("worker_prompt_tokens_total"), w.metric("worker_generated_tokens_total")
            asked = LONG | {"stream": stream, "n": n}
            if stream:
                with httpx.stream("POST", f"{w.url}/v1/chat/completions", json=asked) as answer:
                    assert answer.headers["x-forebay-usage"] == f"{prompt},0,0"
                    lines = answer.iter_lines()
                    next(lines)
            else:
                with pytest.raises(httpx.ReadTimeout):
                    httpx.post(f"{w.url}/v1/chat/completions", json=asked, timeout=0.5)
            w.idle()
            assert w.metric("worker_prompt_tokens_total") == before[0] + prompt
            assert w.metric("worker_generated_tokens_total") >= before[1] + n


def test_a_client_that_does_not_read_is_cut_off_and_frees_all(tmp_path: Path) -> None:
    fast = {"step_ms": 0.0, "prefill_tokens_per_s": 1e9, "concurrency": 64}
    with worker(tmp_path, settings=fast, limits={"stream_buffer_bytes_max": 65_536}) as w:
        w.ready()
        body = json.dumps(LONG | {"stream": True, "n": 8, "max_tokens": 8000}).encode()
        raw = socket.socket()
        with raw:
            raw.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            raw.connect((w.endpoint.host, w.endpoint.port))
            head = b"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\ncontent-length: %d\r\n\r\n" % len(body)
            raw.sendall(head + body)
            until("cut off", lambda: w.metric("worker_requests_total", code="slow_consumer") == 1)
            w.idle()


def test_sigterm_lets_streams_finish_and_refuses_new_requests_retryably(tmp_path: Path) -> None:
    with worker(tmp_path, settings=SLOW_STEPS) as w:
        w.ready()
        engine = w.load().engine_pid
        streams = Streams(w, 2, max_tokens=150)
        until("running", lambda: streams.first == 2)
        w.signal_engine(signal.SIGTERM)  # as systemd does, with all processes of a service
        w.process.send_signal(signal.SIGTERM)
        until("draining", lambda: w.load().state == "draining")
        refused = w.http.post(f"{w.url}/v1/chat/completions", json=LONG)
        assert (refused.status_code, refused.json()["error"]["code"]) == (503, "draining")
        assert refused.headers["x-forebay-retryable"] == "1"
        assert [seen[-1] for seen in streams.done()] == ["[DONE]", "[DONE]"]
        assert w.process.wait(20) == 0
        assert not alive(engine)


def test_what_has_not_finished_at_the_end_of_the_grace_ends_in_an_error(tmp_path: Path) -> None:
    with worker(tmp_path, settings=SLOW_STEPS, drain_grace_s=0.2) as w:
        w.ready()
        streams = Streams(w, 2)
        until("running", lambda: streams.first == 2)
        assert w.stop() == 0
        for seen in streams.done():
            assert error_of(seen) == "draining"


def test_the_engine_dies_with_its_worker(tmp_path: Path) -> None:
    with worker(tmp_path) as w:
        engine = w.ready().load().engine_pid
        w.process.kill()
        w.process.wait()
        until("the engine is gone", lambda: not alive(engine))


def test_a_queue_has_a_bound(tmp_path: Path) -> None:
    with worker(tmp_path, settings=SLOW_STEPS, queue_max=3) as w:
        w.ready()
        streams = Streams(w, 3, max_tokens=100)
        until("running", lambda: streams.first == 3)
        refused = w.http.post(f"{w.url}/v1/chat/completions", json=LONG)
        assert (refused.status_code, refused.json()["error"]["code"]) == (503, "overloaded")
        assert refused.headers["x-forebay-retryable"] == "1"
        assert [seen[-1] for seen in streams.done()] == ["[DONE]"] * 3


def test_an_engine_gets_all_that_it_can_run_at_once(tmp_path: Path) -> None:
    with worker(tmp_path, settings=SLOW_STEPS | {"concurrency": 300}) as w:
        w.ready()
        assert statuses(w, 300, "chat/completions", LONG | {"max_tokens": 100}) == {b"200": 300}


def test_requests_for_many_embeddings_wait_for_each_other(tmp_path: Path) -> None:
    with worker(tmp_path, task="embed", settings=SLOW_STEPS) as w:
        w.ready()
        assert statuses(w, 40, "embeddings", {"model": "m", "input": ["text"] * 64}) == {b"200": 40}


def statuses(on: Worker, count: int, path: str, body: dict[str, Any]) -> Counter[bytes]:
    """How often each status is the answer to a request that is sent many times at once."""
    content = json.dumps(body).encode()
    head = f"POST /v1/{path} HTTP/1.1\r\nhost: a\r\ncontent-length: {len(content)}\r\nconnection: close\r\n\r\n"
    with ExitStack() as opened:
        clients = [
            opened.enter_context(socket.create_connection((on.endpoint.host, on.endpoint.port), timeout=30))
            for _ in range(count)
        ]
        for client in clients:
            client.sendall(head.encode() + content)
        return Counter(client.recv(12).split()[1] for client in clients)


def test_a_taken_port_is_passed_over(tmp_path: Path) -> None:
    (tmp_path / "one").mkdir()
    (tmp_path / "two").mkdir()
    with worker(tmp_path / "one") as first, worker(tmp_path / "two", port_first=first.endpoint.port) as second:
        assert second.endpoint.port > first.endpoint.port
        assert second.ready().load().state == "ready"


def test_a_loading_worker_listens_and_says_that_it_warms_up(tmp_path: Path) -> None:
    with worker(tmp_path) as w:
        until("an engine process", lambda: w.load().engine_pid)
        engine = w.signal_engine(signal.SIGSTOP)  # while it still imports its modules
        try:
            assert w.load().state == "warming"
            assert w.http.get(f"{w.url}/readyz").status_code == 503
            assert w.http.get(f"{w.url}/livez").status_code == 200
            refused = w.http.post(f"{w.url}/v1/chat/completions", json=LONG)
            assert (refused.status_code, refused.json()["error"]["code"]) == (503, "engine_loading")
            assert refused.headers["x-forebay-retryable"] == "1"
        finally:
            os.kill(engine, signal.SIGCONT)
        w.ready()


def test_a_bad_call_is_answered_with_usage(tmp_path: Path) -> None:
    bad = tmp_path / "bad.json"
    bad.write_text('{"replica": 5}')
    for arguments in ([], [str(bad)], [str(tmp_path / "none.json")]):
        done = subprocess.run([sys.executable, "-m", "forebay.worker", *arguments], capture_output=True, timeout=30)
        assert done.returncode == 2
        assert done.stderr


def test_a_failing_choice_fails_the_request(tmp_path: Path) -> None:
    with worker(tmp_path) as w, w.ready().client() as client:
        with pytest.raises(openai.BadRequestError) as caught:
            client.completions.create(model="m", prompt=["fine", "x y " * 5000], max_tokens=500)
        assert caught.value.code == "context_length_exceeded"
        w.idle()
