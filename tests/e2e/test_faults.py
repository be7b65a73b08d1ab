"""Faults in a running cluster with real models: what fails, what is answered, what recovers."""

import os
import signal
import socket
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import httpx
import openai
import pytest
from tests.e2e.cluster import Cluster, alive, wait_for

STREAMS = 32
IN_BAND = ("in band: stream_interrupted", "in band: engine_failed", "in band: engine_stalled")


@dataclass
class Outcome:
    """What one client saw."""

    text: str = ""
    finished: bool = False
    error: str = ""

    @property
    def honest(self) -> bool:
        """Complete, or an explicit in-band error after some text: no silent cut, no error before a byte."""
        return (self.finished and not self.error) or (bool(self.text) and self.error in IN_BAND)


def stream_chat(cluster: Cluster, number: int, started: threading.Semaphore, max_tokens: int = 48) -> Outcome:
    """One streamed chat through the official client; `started` is released at its first text."""
    seen = Outcome()
    with cluster.client() as client:
        try:
            stream = client.chat.completions.create(
                model="chat",
                messages=[{"role": "user", "content": f"Story number {number}: tell me about the sea."}],
                max_tokens=max_tokens,
                temperature=0,
                stream=True,
                extra_body={"ignore_eos": True},
            )
            for chunk in stream:
                if not chunk.choices:
                    continue
                if not seen.text and chunk.choices[0].delta.content:
                    started.release()
                seen.text += chunk.choices[0].delta.content or ""
                seen.finished = seen.finished or chunk.choices[0].finish_reason is not None
        except openai.APIStatusError as error:
            seen.error = f"status {error.status_code}: {error.code}"
        except openai.APIError as error:
            seen.error = f"in band: {error.code}"
    return seen


def under_load(cluster: Cluster, fault: Any, streams: int = STREAMS, started_min: int = 4) -> list[Outcome]:
    """Run `streams` clients at once and call `fault()` when a few of them have begun to receive text."""
    started = threading.Semaphore(0)
    with ThreadPoolExecutor(streams) as pool:
        futures = [pool.submit(stream_chat, cluster, n, started) for n in range(streams)]
        for _ in range(started_min):
            assert started.acquire(timeout=60)
        fault()
        return [f.result() for f in futures]


def test_killed_chat_replica_under_32_streams_loses_only_started_streams(demo: Cluster) -> None:
    victim = demo.ready_replicas("chat")[0]

    outcomes = under_load(demo, lambda: os.kill(victim["pid"], signal.SIGKILL))

    assert [o for o in outcomes if not o.honest] == []
    assert sum(o.finished for o in outcomes) >= STREAMS // 4
    wait_for(
        "a new generation of the killed replica is ready",
        lambda: [
            r
            for r in demo.ready_replicas("chat")
            if r["id"] == victim["id"] and r["generation"] > victim["generation"]
        ],
        120,
    )
    wait_for("its engine is gone, too", lambda: not alive(victim["engine_pid"]))


def test_killing_an_engine_child_fails_only_its_streams_and_is_repaired(demo: Cluster) -> None:
    victim = demo.ready_replicas("chat")[1]

    outcomes = under_load(demo, lambda: os.kill(victim["engine_pid"], signal.SIGKILL))

    assert [o for o in outcomes if not o.honest] == []
    assert {o.error for o in outcomes} <= {"", "in band: engine_failed"}
    repaired = wait_for(
        "a new engine child in the same worker",
        lambda: [
            r
            for r in demo.ready_replicas("chat")
            if r["id"] == victim["id"] and r["engine_pid"] not in (None, victim["engine_pid"])
        ],
    )
    assert repaired[0]["pid"] == victim["pid"]


def test_hung_engine_that_recovers_in_time_is_kept(demo: Cluster) -> None:
    victim = demo.ready_replicas("chat")[0]

    def hang() -> None:
        os.kill(victim["engine_pid"], signal.SIGSTOP)
        try:
            wait_for(
                "the replica is reported as not ready",
                lambda: victim["id"] not in [r["id"] for r in demo.ready_replicas("chat")],
                20,
            )
        finally:
            os.kill(victim["engine_pid"], signal.SIGCONT)

    outcomes = under_load(demo, hang, streams=8)

    assert [o for o in outcomes if not o.finished] == []
    after = wait_for("it is ready again", lambda: [r for r in demo.ready_replicas("chat") if r["id"] == victim["id"]])
    assert after[0]["engine_pid"] == victim["engine_pid"]


def test_permanently_hung_engine_is_replaced(demo: Cluster) -> None:
    victim = demo.ready_replicas("chat")[0]

    outcomes = under_load(demo, lambda: os.kill(victim["engine_pid"], signal.SIGSTOP), streams=8)

    assert [o for o in outcomes if not o.honest] == []
    wait_for("the hung engine is gone", lambda: not alive(victim["engine_pid"]))
    wait_for(
        "its replacement is ready",
        lambda: [
            r
            for r in demo.ready_replicas("chat")
            if r["id"] == victim["id"] and r["engine_pid"] != victim["engine_pid"]
        ],
    )


def test_a_hung_worker_is_routed_around_and_replaced(demo: Cluster) -> None:
    victim = demo.ready_replicas("chat")[1]

    outcomes = under_load(demo, lambda: os.kill(victim["pid"], signal.SIGSTOP), streams=8)

    assert [o for o in outcomes if not o.honest] == []
    wait_for("the hung worker is gone", lambda: not alive(victim["pid"]))
    demo.wait_ready(90)


def test_killed_gateway_is_restarted_immediately(demo: Cluster) -> None:
    gateway = demo.status()["gateways"][0]

    os.kill(gateway["pid"], signal.SIGKILL)

    wait_for("the gateway answers again", lambda: httpx.get(f"{demo.url}/readyz", timeout=2).status_code == 200)
    assert demo.status()["gateways"][0]["pid"] != gateway["pid"]


def test_client_disconnect_frees_engine_and_counters(demo: Cluster) -> None:
    with demo.client() as client:
        stream = client.chat.completions.create(
            model="chat",
            messages=[{"role": "user", "content": "Count to one thousand."}],
            max_tokens=4000,
            stream=True,
            extra_body={"ignore_eos": True},
        )
        next(iter(stream))
        wait_for("it runs", lambda: sum(r["running"] for r in demo.replicas("chat")) == 1)
        stream.close()

    def idle() -> bool:
        loads = demo.replicas("chat")
        in_flight = {k: v for k, v in demo.metrics().items() if k.startswith("forebay_in_flight")}
        return not any(r["running"] or r["waiting"] or r["in_flight"] for r in loads) and not any(in_flight.values())

    wait_for("every counter is back to zero", idle)


def raw(cluster: Cluster, data: bytes, timeout_s: float = 30) -> bytes:
    """Send bytes, read to the end."""
    with socket.create_connection(("127.0.0.1", cluster.gateway_port), timeout=timeout_s) as connection:
        connection.sendall(data)
        answer = b""
        while chunk := connection.recv(65536):
            answer += chunk
    return answer


def test_incomplete_request_times_out_with_408(demo: Cluster) -> None:
    answer = raw(demo, b"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Le")

    assert answer.startswith(b"HTTP/1.1 408 ")
    assert b'"request_timeout"' in answer


def test_oversized_head_is_431_and_oversized_body_is_413(demo: Cluster) -> None:
    head = raw(demo, b"GET /v1/models HTTP/1.1\r\nHost: x\r\nX-Big: " + b"a" * 100_000 + b"\r\n\r\n")
    body = raw(demo, b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 99999999999\r\n\r\n")

    assert head.startswith(b"HTTP/1.1 431 ")
    assert b'"headers_too_large"' in head
    assert body.startswith(b"HTTP/1.1 413 ")
    assert b'"body_too_large"' in body


def test_thousand_idle_connections_do_not_block_requests(demo: Cluster) -> None:
    idle = [socket.create_connection(("127.0.0.1", demo.gateway_port), timeout=10) for _ in range(1000)]
    try:
        with demo.client() as client:
            assert client.embeddings.create(model="embed", input="still there?").data
        assert sum(v for k, v in demo.metrics().items() if k.startswith("forebay_open_connections{")) >= 1000
    finally:
        for each in idle:
            each.close()


CHAT_FIELDS = [
    "model", "messages", "stream", "n", "stop", "seed", "temperature", "top_p", "max_tokens", "max_completion_tokens",
    "logprobs", "top_logprobs", "frequency_penalty", "presence_penalty", "response_format", "stream_options",
]  # fmt: skip


@pytest.mark.parametrize("field", CHAT_FIELDS)
def test_wrong_type_in_any_field_is_a_400_naming_the_field(demo: Cluster, field: str) -> None:
    good = {"model": "chat", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 1, "stream": False}
    for wrong in ({"wrong": ["type"]}, [[7]]):
        answer = httpx.post(f"{demo.url}/v1/chat/completions", json={**good, field: wrong}, timeout=30)

        assert answer.status_code == 400, answer.text
        assert field in (answer.json()["error"]["param"] or "")


@pytest.mark.parametrize(
    "body",
    [b"", b"{", b"[]", b"null", b'"x"', b'{"model": "chat"', b"\xff\xfe{}", b'{"model": "\xc3("}', b"[" * 50_000],
)
def test_non_json_body_is_a_400(demo: Cluster, body: bytes) -> None:
    answer = httpx.post(f"{demo.url}/v1/chat/completions", content=body, timeout=30)

    assert answer.status_code == 400
    assert answer.json()["error"]["code"] in ("invalid_json", "invalid_request")


def test_requests_that_would_break_the_engine_are_rejected(demo: Cluster) -> None:
    engines = {r["id"]: r["engine_pid"] for r in demo.ready_replicas("chat")}
    bad: list[dict[str, Any]] = [
        {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "nonsense"}}}},
        {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": {"$ref": "#/nowhere"}}}},
        {"temperature": -1},
        {"top_p": 0},
        {"messages": []},
        {"max_tokens": 0},
        {"max_tokens": 10**9},
        {"stop": [""]},
    ]
    for extra in bad:
        body = {"model": "chat", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 4, **extra}
        answer = httpx.post(f"{demo.url}/v1/chat/completions", json=body, timeout=30)
        assert answer.status_code == 400, (extra, answer.text)

    empty = httpx.post(f"{demo.url}/v1/completions", json={"model": "chat", "prompt": ""}, timeout=30)
    assert empty.status_code == 400
    wait_for("the same serve", lambda: engines == {r["id"]: r["engine_pid"] for r in demo.ready_replicas("chat")})
