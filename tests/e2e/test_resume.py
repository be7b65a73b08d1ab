"""Replicas are killed repeatedly under streaming clients, and clients see no error."""

import os
import signal
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from itertools import count
from pathlib import Path
from queue import Queue
from typing import Any

import anthropic
import openai
import pytest
from tests.e2e.cluster import CHAT, Cluster, running

STREAMS, REPLICAS = 64, 4
TOKENS = 150
KILL_EVERY_S = 5.0
SYNTHETIC = {
    "name": "chat",
    "task": "chat",
    "source": "synthetic",
    "engine": {"name": "synthetic", "step_ms": 20},
    "replicas": REPLICAS,
}


def ask(client: openai.OpenAI, number: int, tokens: int, begun: Queue[str] | None = None) -> str:
    """The whole text of a stream; any error is raised. `begun` is told at its first text which replica writes."""
    stream = client.chat.completions.create(
        model="chat",
        messages=[{"role": "user", "content": f"Story number {number}: tell me about the sea."}],
        max_tokens=tokens,
        temperature=0,
        stream=True,
        stream_options={"include_usage": True},
        extra_body={"ignore_eos": True},
    )
    text, reason, used = "", None, 0
    for chunk in stream:
        if chunk.usage is not None:
            used = chunk.usage.completion_tokens
        for choice in chunk.choices:
            if begun is not None and not text and choice.delta.content:
                begun.put(stream.response.headers["x-forebay-replica"])
            text += choice.delta.content or ""
            reason = choice.finish_reason or reason
    assert (reason, used) == ("length", tokens), f"story {number} ended with {reason} after {used} tokens"
    return text


def ask_message(client: anthropic.Anthropic, number: int, begun: Queue[str] | None = None) -> tuple[Any, ...]:
    """Text, stop reason and token counts of a message that is streamed; any error is raised, also one of order."""
    stream = client.messages.create(
        model="chat",
        system="Tell what you are asked for.",
        messages=[{"role": "user", "content": f"Story number {number}: tell me about the sea."}],
        max_tokens=TOKENS,
        stream=True,
        extra_body={"temperature": 0},
    )
    kinds: list[str] = []
    text, last = "", None
    for event in stream:
        if not kinds or kinds[-1] != event.type:
            kinds.append(event.type)
        if event.type == "content_block_delta" and event.delta.type == "text_delta":
            assert event.index == 0
            if begun is not None and not text:
                begun.put(stream.response.headers["x-forebay-replica"])
            text += event.delta.text
        elif event.type == "message_delta":
            last = event
    assert kinds == [
        "message_start", "content_block_start", "content_block_delta", "content_block_stop", "message_delta",
        "message_stop",
    ]  # fmt: skip
    assert last is not None
    return text, last.delta.stop_reason, last.usage.input_tokens, last.usage.output_tokens


def ask_response(client: openai.OpenAI, number: int, begun: Queue[str] | None = None) -> tuple[Any, ...]:
    """The same of a response."""
    stream = client.responses.create(
        model="chat",
        instructions="Tell what you are asked for.",
        input=f"Story number {number}: tell me about the sea.",
        max_output_tokens=TOKENS,
        temperature=0,
        stream=True,
    )
    text, numbers, ids, response = "", [], set(), None
    for event in stream:
        numbers.append(event.sequence_number)
        if event.type == "response.output_text.delta":
            if begun is not None and not text:
                begun.put(stream.response.headers["x-forebay-replica"])
            text += event.delta
            ids.add(event.item_id)
        elif event.type in ("response.completed", "response.incomplete"):
            response = event.response
    assert numbers == list(range(len(numbers)))
    assert response is not None
    assert response.usage is not None
    assert (response.output_text, {item.id for item in response.output}) == (text, ids)
    return text, response.status, response.usage.input_tokens, response.usage.output_tokens


@contextmanager
def killing(cluster: Cluster, which: Callable[[dict[str, Any]], int | None], for_s: float) -> Iterator[list[int]]:
    """Kill one process of a ready replica every few seconds, a different replica each time."""
    killed: list[int] = []
    over = threading.Event()

    def run() -> None:
        for turn in count():
            if over.wait(KILL_EVERY_S) or turn * KILL_EVERY_S >= for_s:
                return
            ready = {r["id"]: r for r in cluster.ready_replicas("chat")}
            victim = ready.get(f"chat-{turn % REPLICAS}")
            pid = which(victim) if victim is not None else None
            if pid is not None and len(ready) > 1:
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
                    killed.append(pid)

    with ThreadPoolExecutor(1) as pool:
        done = pool.submit(run)
        try:
            yield killed
            done.result()
        finally:
            over.set()


@pytest.mark.parametrize(("victim", "for_s"), [("pid", 60.0), ("engine_pid", 25.0)])
def test_streams_survive_a_replica_killed_every_five_seconds(tmp_path: Path, victim: str, for_s: float) -> None:
    # 4 s at this pace, so that most kills hit many streams: for long steps clients are never what takes the time
    tokens, slow = 40, {**SYNTHETIC, "engine": {"name": "synthetic", "step_ms": 100}}
    with running(tmp_path, f"resume-{victim}".replace("_", "-"), [slow]) as cluster, cluster.client() as client:
        with ThreadPoolExecutor(STREAMS) as pool:
            undisturbed = list(pool.map(lambda n: ask(client, n, tokens), range(STREAMS)))
            with killing(cluster, lambda replica: replica[victim], for_s) as killed:
                over = threading.Event()

                def keep_asking(number: int) -> list[str]:
                    texts = []
                    while not over.is_set():
                        texts.append(ask(client, number, tokens))
                    return texts

                futures = [pool.submit(keep_asking, n) for n in range(STREAMS)]
                threading.Event().wait(for_s)
                over.set()
                answers = [future.result() for future in futures]

        assert len(killed) >= for_s / KILL_EVERY_S / 2
        assert [set(texts) for texts in answers] == [{text} for text in undisturbed]
        assert sum(v for k, v in cluster.metrics().items() if k.startswith("forebay_resumes_total")) > len(killed)


def kill_the_last_to_begin(pids: dict[str, int], begun: Queue[str], streams: int) -> None:
    """When all have begun, kill the replica of the last: that one surely still has most of a stream to write."""
    last = [begun.get(timeout=60) for _ in range(streams)][-1]
    os.kill(pids[last], signal.SIGKILL)


def processes(cluster: Cluster) -> dict[str, int]:
    """The worker of each replica."""
    return {r["id"]: r["pid"] for r in cluster.ready_replicas("chat")}


def test_message_and_response_streams_survive_a_killed_replica(tmp_path: Path) -> None:
    with (
        running(tmp_path, "resume-apis", [SYNTHETIC]) as cluster,
        cluster.client() as client,
        anthropic.Anthropic(base_url=cluster.url, api_key="none", max_retries=0, timeout=120) as claude,
        ThreadPoolExecutor(STREAMS) as pool,
    ):

        def start(begun: Queue[str] | None = None) -> list[Future[tuple[Any, ...]]]:
            numbers = range(STREAMS // 2)
            messages = [pool.submit(ask_message, claude, n, begun) for n in numbers]
            return messages + [pool.submit(ask_response, client, n, begun) for n in numbers]

        undisturbed = [future.result() for future in start()]
        begun: Queue[str] = Queue()
        pids = processes(cluster)
        futures = start(begun)
        kill_the_last_to_begin(pids, begun, len(futures))

        assert [future.result() for future in futures] == undisturbed
        assert sum(v for k, v in cluster.metrics().items() if k.startswith("forebay_resumes_total")) >= 1


def test_resumed_stream_of_a_real_model_continues_its_text(tmp_path: Path) -> None:
    tokens = 96
    with (
        running(tmp_path, "resume-real", [{**CHAT, "replicas": 2}]) as cluster,
        cluster.client() as client,
        ThreadPoolExecutor(8) as pool,
    ):
        begun: Queue[str] = Queue()
        pids = processes(cluster)
        futures = [pool.submit(ask, client, n, tokens, begun) for n in range(8)]
        kill_the_last_to_begin(pids, begun, len(futures))

        for text in (future.result() for future in futures):
            assert len(text.split()) > tokens // 4
        resumed = sum(v for k, v in cluster.metrics().items() if k.startswith("forebay_resumes_total"))
        assert resumed >= 1
