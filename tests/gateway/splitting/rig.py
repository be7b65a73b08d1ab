"""A model with two revisions behind a gateway: `r1` serves, `r2` is to serve."""

import asyncio
import contextlib
import itertools
from collections.abc import AsyncIterator, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
from tests.gateway.rig import ROUTES, Front, Worker, chat, cluster, post, routes
from tests.net.rig import PATIENCE_S, Answer, peer

from forebay.core.deploy.samples import Observed
from forebay.core.model import Endpoint, ModelRoutes, Split
from forebay.core.rollout.sides import side_of
from forebay.core.rollout.values import Arm
from forebay.net.server import Exchange, Handler
from forebay.wire.openai_answer import DONE, ChatAnswer, Head

ROLLOUT = "chat:1"
STABLE, CANARY = "r1", "r2"
_turns = itertools.count()


def split(share: float = 0.0, **more: Any) -> Split:
    """A split of the rollout of these tests."""
    return Split(ROLLOUT, STABLE, CANARY, share, **more)


def stable(answer: Handler, number: int = 0, **more: Any) -> Worker:
    """A replica of the revision that serves."""
    return Worker(answer, f"chat-{number}", **more)


def canary(answer: Handler, number: int = 5, **more: Any) -> Worker:
    """A replica of the revision that is to serve."""
    return Worker(answer, f"chat-{number}", revision=CANARY, **more)


def ids(arm: Arm, share: float, prefix: str = "id") -> Iterator[str]:
    """Ids of requests that belong to an arm."""
    number = 0
    while True:
        id = f"{prefix}-{number}"
        if side_of(id, ROLLOUT, share) is arm:
            yield id
        number += 1


def mirrored_ids(mirrored: float, copied: bool) -> Iterator[str]:
    """Ids of requests that are copied, or not."""
    number = 0
    while True:
        if (side_of(f"mirror id-{number}", ROLLOUT, mirrored) is Arm.CANARY) == copied:
            yield f"id-{number}"
        number += 1


def ask(id: str = "", *fields: bytes, **body: Any) -> bytes:
    """A chat request with this id."""
    given = (b"x-request-id: " + id.encode(), *fields) if id else fields
    return post(chat(**body), b"/v1/chat/completions", *given)


@contextlib.asynccontextmanager
async def splitting(folder: Path, given: Split, *workers: Worker, **more: Any) -> AsyncIterator[Front]:
    """A gateway that has heard of all these workers."""
    base: ModelRoutes = replace(more.pop("base", ROUTES), split=given)
    async with cluster(folder, *workers, base=base, **more) as front:
        for worker in workers:
            await up(front, worker)
        yield front


async def metric(front: Front, line: str, value: float) -> None:
    """Wait, within bounds, until a metric of the model has this value."""
    async with asyncio.timeout(PATIENCE_S):
        while await front.metric(f"forebay_{line}") != value:
            await asyncio.sleep(0.002)


async def up(front: Front, worker: Worker) -> None:
    """Wait until the gateway sends requests to a worker."""
    await metric(front, f'replica_up{{model="chat",replica="{worker.replica}"}}', 1)


async def turn(front: Front, given: Split | None, *workers: Worker, base: ModelRoutes = ROUTES) -> None:
    """Give the gateway another split, and wait until it has taken it over."""
    marker = f"marker-{next(_turns)}"
    front.write(replace(routes(*workers, base=base), split=given), replace(ROUTES, name=marker, replicas=()))
    async with asyncio.timeout(PATIENCE_S):
        while marker.encode() not in (await front.get(b"/v1/models")).body:
            await asyncio.sleep(0.002)


async def observed(front: Front, after: int = 0, instance: str = "") -> Observed:
    """What the gateway tells control."""
    peers = Path(front.spec.peers_dir) / f"{front.spec.id}.json"
    port = msgspec.json.decode(peers.read_bytes(), type=Endpoint).port
    target = f"/observations?after={after}&instance={instance}"
    async with peer(port) as client:
        client.send(f"GET {target} HTTP/1.1\r\nhost: a\r\n\r\n".encode())
        answer = await client.answer()
    assert answer.status == 200
    return msgspec.json.decode(answer.body, type=Observed)


async def sampled(front: Front, samples: int, pairs: int = 0) -> Observed:
    """The same, once there are so many samples and pairs."""
    async with asyncio.timeout(PATIENCE_S):
        while True:
            found = await observed(front)
            if len(found.samples) >= samples and len(found.pairs) >= pairs:
                return found
            await asyncio.sleep(0.002)


def said(text: str, **headers: bytes) -> Handler:
    """Answer with this text, whole or as a stream, as is asked for."""
    usage = headers.get("usage", b"7,%d,0" % len(text.split()))

    def answer(exchange: Exchange) -> None:
        told = (b"x-forebay-usage", usage)
        if b'"stream":true' in exchange.body:
            chunks = ChatAnswer(Head("chatcmpl-1", 1, "chat", "r"), stream=True)
            exchange.start(200, [(b"content-type", b"text/event-stream")])
            if exchange.header(b"x-forebay-continue") is None:
                exchange.write(chunks.opening(0))
            for word in text.split(" "):
                exchange.write(chunks.delta(0, word + " "))
            exchange.write(chunks.finish(0, "stop"))
            exchange.write(DONE)
            exchange.end([told])
        else:
            message = {"role": "assistant", "content": text}
            body = msgspec.json.encode({"choices": [{"index": 0, "message": message, "finish_reason": "stop"}]})
            exchange.respond(200, [(b"content-type", b"application/json"), told], body)

    return answer


def revision(answer: Answer) -> str:
    """Which revision has answered."""
    return answer.headers[b"x-forebay-model-revision"].decode()
