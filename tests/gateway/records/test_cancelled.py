"""What a request is billed whose client leaves: what a replica has really done for it, and nothing else."""

import asyncio
from collections.abc import Callable, Coroutine
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pytest
from tests.gateway.records.rig import ledger_sums
from tests.gateway.rig import (
    CHAT,
    EVENT_STREAM,
    JSON,
    ROUTES,
    USAGE,
    Front,
    Worker,
    chat,
    cluster,
    fronting,
    post,
    read_until,
    routes,
    working,
)
from tests.net.rig import peer, run, until
from tests.worker.rig import Worker as RealWorker
from tests.worker.rig import worker

from forebay.core.model import RecordsSpec, Replica, ReplicaState
from forebay.core.routing.speed import PACE_S
from forebay.gateway.records.saved import Sums
from forebay.net.server import Exchange, Handler
from forebay.wire.openai_answer import ChatAnswer, Head

QUESTION = [{"role": "user", "content": "why is it so " * 40}]
MAX = {"max_tokens": 4000}
BODIES: dict[bytes, tuple[dict[str, Any], bytes]] = {
    CHAT: ({"messages": QUESTION, "ignore_eos": True, **MAX}, b'"content":'),
    b"/v1/completions": ({"prompt": QUESTION[0]["content"], "ignore_eos": True, **MAX}, b'"text":'),
    b"/v1/messages": ({"messages": QUESTION, **MAX}, b"event: content_block_delta\n"),
    b"/v1/responses": ({"input": QUESTION, "max_output_tokens": 4000}, b"event: response.output_text.delta\n"),
}


def billed(folder: Path) -> Sums:
    return ledger_sums(folder / "records")


async def ended(front: Front, tokens: str = "prompt") -> float:
    """A metric of tokens once the client's leaving has been noticed."""
    named = f'forebay_requests_total{{code="client_closed",model="{ROUTES.name}"}}'
    while await front.metric(named) < 1:
        await asyncio.sleep(0.01)
    return await front.metric(f'forebay_{tokens}_tokens_total{{model="{ROUTES.name}"}}')


def begins(usage: bytes | None, words: int = 3) -> Any:
    """A replica that says so much and goes silent; `usage` is in its head."""

    def answer(exchange: Exchange) -> None:
        chunks = ChatAnswer(Head("chatcmpl-1", 1, "chat", "r1"), stream=True)
        exchange.start(200, [EVENT_STREAM] + ([(b"x-forebay-usage", usage)] if usage is not None else []))
        exchange.write(chunks.opening(0) + b"".join(chunks.delta(0, f" {n}") for n in range(words)))

    return answer


@pytest.mark.parametrize(
    ("usage", "prompt", "cached"),
    [
        (b"451,0,64", 451, 64),
        (b"451,0,", 451, 0),
        (b"451,99,900", 451, 451),
        (None, -1, 0),
        (b"-451,0,0", -1, 0),
        (b"999999999999,0,0", -1, 0),
        (b"9" * 200, -1, 0),
        (b"many", -1, 0),
        (b"", -1, 0),
    ],
)
def test_cancelled_stream_is_billed_by_its_initial_usage_and_text(
    tmp_path: Path, usage: bytes | None, prompt: int, cached: int
) -> None:
    request = chat(stream=True)

    async def main() -> None:
        records = RecordsSpec(str(tmp_path / "records"))
        async with cluster(tmp_path, Worker(begins(usage)), records=records) as front:
            async with peer(front.port) as client:
                client.send(post(request))
                head = await read_until(client, b'" 2"')
                assert b"x-forebay-usage" not in head
            assert await ended(front, "completion") == 3

    run(main())
    sums = billed(tmp_path)
    estimate = sums.prompt_tokens if prompt < 0 else prompt
    assert 0 < estimate <= len(request) or estimate == 451
    assert (sums.requests, sums.prompt_tokens, sums.completion_tokens) == (1, estimate, 3)
    assert (sums.cached_tokens, sums.estimated) == (cached, 1)


def test_final_usage_of_a_stream_takes_precedence(tmp_path: Path) -> None:
    def answer(exchange: Exchange) -> None:
        begins(b"451,0,64")(exchange)
        exchange.write(b"data: [DONE]\n\n")
        exchange.end([(b"x-forebay-usage", b"7,5,2")])

    async def main() -> None:
        records = RecordsSpec(str(tmp_path / "records"))
        async with cluster(tmp_path, Worker(answer), records=records) as front:
            await front.ask(post(chat(stream=True)))

    run(main())
    sums = billed(tmp_path)
    assert (sums.prompt_tokens, sums.completion_tokens, sums.cached_tokens, sums.estimated) == (7, 5, 2, 0)


def test_an_answer_that_is_cut_off_before_its_client_has_any_of_it_is_not_billed(tmp_path: Path) -> None:
    def cut(exchange: Exchange) -> None:
        exchange.start(200, [JSON, USAGE], b'{"object":')
        exchange.abort()

    async def main() -> None:
        records = RecordsSpec(str(tmp_path / "records"))
        async with cluster(tmp_path, Worker(cut), Worker(cut, "chat-1"), records=records) as front:
            assert (await front.ask(post(chat()))).status == 502

    run(main())
    sums = billed(tmp_path)
    assert (sums.requests, sums.prompt_tokens, sums.completion_tokens) == (1, 0, 0)


@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_leaves_before_routing_is_billed_nothing(tmp_path: Path, stream: bool) -> None:
    async def main() -> None:
        records = RecordsSpec(str(tmp_path / "records"))
        full = Worker()
        full.report = replace(full.report, capacity=0, state=ReplicaState.WARMING)
        async with working(full), fronting(tmp_path, replace(routes(full), replicas=()), records=records) as front:
            async with peer(front.port) as client:
                client.send(post(chat(stream=stream)))
                while await front.metric(f'forebay_queue_depth{{model="{ROUTES.name}"}}') != 1:
                    await asyncio.sleep(0.01)
            await until(lambda: bool(front.lines()))
        assert full.bodies == []

    run(main())
    sums = billed(tmp_path)
    assert (sums.prompt_tokens, sums.completion_tokens, sums.cached_tokens, sums.estimated) == (0, 0, 0, 0)


def worked(folder: Path, main: Callable[[Front, RealWorker], Coroutine[None, None, None]]) -> tuple[float, float]:
    """Prompt and answer tokens by the account of a real worker, after `main` has asked it through a gateway."""

    async def ask(row: Replica, engine: RealWorker) -> None:
        records = RecordsSpec(str(folder / "records"))
        async with fronting(folder, replace(ROUTES, replicas=(row,)), records=records) as front:
            await front.ready()
            await main(front, engine)

    with worker(folder, model=ROUTES.name, revision="r1", settings={"step_ms": 20.0}) as engine:
        engine.ready()
        at = engine.endpoint
        run(ask(Replica("m-0", 1, "r1", at.host, at.port, ReplicaState.READY), engine))
        engine.idle()
        return engine.metric("worker_prompt_tokens_total"), engine.metric("worker_generated_tokens_total")


@pytest.mark.slow
@pytest.mark.parametrize("path", BODIES)
def test_ledger_and_worker_agree_on_the_tokens_of_a_cancelled_stream(tmp_path: Path, path: bytes) -> None:
    body, mark = BODIES[path]
    asked = msgspec.json.encode({"model": ROUTES.name, "stream": True, "temperature": 0} | body)
    seen = b""

    async def main(front: Front, _: RealWorker) -> None:
        nonlocal seen
        async with peer(front.port) as client:
            client.send(post(asked, path))
            while seen.count(mark) < 12:
                seen += await read_until(client, b"\n\n")
        await ended(front)

    read, made = worked(tmp_path, main)
    sums = billed(tmp_path)
    opening = seen.count(b'"role":"assistant","content":""') if path == CHAT else 0
    assert sums.prompt_tokens == read > 100
    assert seen.count(mark) - opening <= sums.completion_tokens <= made
    assert sums.completion_tokens <= seen.count(mark) - opening + 3, "only what was on its way may be more"
    assert sums.estimated == 1


@pytest.mark.slow
def test_cancelled_unstreamed_answer_is_billed_an_estimate_of_generated_tokens(tmp_path: Path) -> None:
    short = msgspec.json.encode({"model": ROUTES.name, "messages": QUESTION, "max_tokens": 30, "ignore_eos": True})
    left = msgspec.json.encode({"model": ROUTES.name, "messages": QUESTION, "ignore_eos": True, **MAX})

    async def main(front: Front, engine: RealWorker) -> None:
        for _ in range(4):
            assert (await front.ask(post(short))).status == 200
        async with peer(front.port) as client:
            client.send(post(left))
            await until(lambda: engine.metric("worker_generated_tokens_total") >= 4 * 30 + 40)
        await ended(front)

    read, made = worked(tmp_path, main)
    sums = billed(tmp_path)
    assert sums.prompt_tokens == pytest.approx(read, rel=0.1)
    assert (made - 120) / 4 < sums.completion_tokens - 120 < 4 * (made - 120), (made, sums.completion_tokens)
    assert sums.estimated == 1


async def left(folder: Path, request: bytes, after_s: float, answer: Handler = lambda _: None) -> None:
    """A client leaves so long after a worker has its request, which says no more than `answer` does."""
    worker = Worker(answer)
    async with cluster(folder, worker, records=RecordsSpec(str(folder / "records"))) as front:
        async with peer(front.port) as client:
            client.send(request)
            await until(lambda: bool(worker.requests))
            enough_at = asyncio.get_running_loop().time() + after_s
            await until(lambda: asyncio.get_running_loop().time() > enough_at)
        await until(lambda: bool(front.lines()))


@pytest.mark.parametrize(
    ("path", "more", "prompt", "completion"),
    [
        (CHAT, {"max_tokens": 2}, True, range(2, 3)),
        (CHAT, {"max_tokens": 2, "n": 2}, True, range(4, 5)),
        (CHAT, {}, True, range(4, 257)),
        (CHAT, {"max_tokens": 2, "stream": True}, True, range(1)),
        (b"/v1/messages/count_tokens", {}, False, range(1)),
    ],
)
def test_a_client_that_leaves_before_the_response_is_billed_an_estimate(
    tmp_path: Path, path: bytes, more: dict[str, object], prompt: bool, completion: range
) -> None:
    body = msgspec.json.encode({"model": ROUTES.name, "messages": [{"role": "user", "content": "hi"}], **more})
    run(left(tmp_path, post(body, path), 8 * PACE_S))
    sums = billed(tmp_path)
    assert (bool(sums.prompt_tokens), sums.estimated) == (prompt, prompt)
    assert sums.completion_tokens in completion


def test_prompt_that_was_not_prefilled_before_cancellation_is_not_billed(tmp_path: Path) -> None:
    long = msgspec.json.encode({"model": ROUTES.name, "messages": [{"role": "user", "content": "word " * 200_000}]})
    run(left(tmp_path, post(long), 0.0))
    assert (billed(tmp_path).prompt_tokens, billed(tmp_path).completion_tokens) == (0, 0)


@pytest.mark.parametrize(
    ("usage", "stream", "counts"), [(b"451,0,64", True, (451, 0, 64, 1)), (b"451,7,64", False, (451, 7, 64, 0))]
)
def test_usage_reported_before_a_disconnect_is_not_marked_as_estimated(
    tmp_path: Path, usage: bytes, stream: bool, counts: tuple[int, int, int, int]
) -> None:
    def answer(exchange: Exchange) -> None:
        kind = EVENT_STREAM if stream else (b"content-type", b"application/json")
        exchange.start(200, [kind, (b"x-forebay-usage", usage)])
        exchange.write(b"" if stream else b'{"half": ')

    run(left(tmp_path, post(chat(stream=stream)), 8 * PACE_S, answer))
    sums = billed(tmp_path)
    assert (sums.prompt_tokens, sums.completion_tokens, sums.cached_tokens, sums.estimated) == counts
