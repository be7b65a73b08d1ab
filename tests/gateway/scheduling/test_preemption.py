"""Batch work makes way for everybody else, at any time, and nothing of it is lost by that."""

import asyncio
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import msgspec
import pytest
from tests.gateway.rig import (
    CHAT,
    EVENT_STREAM,
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
    whole,
    working,
)
from tests.net.rig import Answer, peer, run, until

from forebay.core.admission import Band, RequestQueue, Ticket
from forebay.core.model import Condition, StandIn
from forebay.core.routing import Route, Wait, Why
from forebay.gateway.dispatch import dispatching
from forebay.gateway.scheduling.preemption import preempt_batch
from forebay.net.server import Exchange, Handler
from forebay.wire.openai_answer import DONE, ChatAnswer, Head

WORDS = tuple(f" wörd{n}" for n in range(12))


class Tellers:
    """Replicas that tell WORDS as a stream, so far as they are let; what does not stream is held until it is told."""

    def __init__(self) -> None:
        self.held: list[Exchange] = []
        self.begun: list[int] = []
        self.gone: list[bytes] = []
        self.head = [EVENT_STREAM]

    def __call__(self, exchange: Exchange) -> None:
        self.held.append(exchange)
        exchange.on_disconnect = lambda: self.gone.append(exchange.body)
        if not msgspec.json.decode(exchange.body.partition(b" w")[0])["stream"]:
            return
        seam = exchange.header(b"x-forebay-continue")
        self.said = exchange.body[len(exchange.body) - int(seam.split(b",")[2]) :].decode() if seam else ""
        self.begun.append(len(self.said.split()))
        self.chunks = ChatAnswer(Head("chatcmpl-1", 17, "chat", "r1"), stream=True)
        exchange.start(200, self.head)
        if not seam:
            exchange.write(self.chunks.opening(0))

    def tell(self, exchange: Exchange, words: tuple[str, ...]) -> None:
        for word in words:
            exchange.write(self.chunks.delta(0, word))

    def finish(self, exchange: Exchange, begun: int) -> None:
        self.tell(exchange, WORDS[begun:])
        exchange.write(self.chunks.finish(0, "stop"))
        exchange.write(DONE)
        exchange.end([USAGE])


def of_band(band: str, **more: Any) -> bytes:
    """A request of a band; its `user` says which."""
    body = {"stream": False, **more}
    return post(chat(user=band, **body), CHAT, b"x-forebay-priority: " + band.encode())


def worker(tellers: Handler, capacity: int, replica: str = "chat-0") -> Worker:
    """A replica that runs so many requests at once."""
    made = Worker(tellers, replica)
    made.report = replace(made.report, capacity=capacity)
    return made


def text_of(body: bytes) -> str:
    """What a whole stream says."""
    *events, done = body.removesuffix(b"\n\n").split(b"\n\n")
    assert done == b"data: [DONE]"
    chunks = [msgspec.json.decode(event.removeprefix(b"data: ")) for event in events]
    assert [chunk["choices"][0]["finish_reason"] for chunk in chunks] == [None] * (len(chunks) - 1) + ["stop"]
    assert sum("role" in chunk["choices"][0]["delta"] for chunk in chunks) == 1
    return "".join(chunk["choices"][0]["delta"].get("content", "") for chunk in chunks)


async def preempted(front: Front, count: int) -> None:
    """Until so many batch attempts gave way."""
    async with asyncio.timeout(10):
        while await front.metric('forebay_preemptions_total{band="batch",model="chat"}') != count:
            await asyncio.sleep(0.005)


@pytest.mark.parametrize("cuts", [(0,), (1,), (5, 5, 9), (2, 3, 4, 5, 6, 7, 8, 9, 10, 11)])
def test_batch_stream_pauses_for_urgent_requests_and_continues(tmp_path: Path, cuts: tuple[int, ...]) -> None:
    tellers = Tellers()

    async def main() -> None:
        async with cluster(tmp_path, worker(tellers, 1)) as front, asyncio.TaskGroup() as group:
            async with peer(front.port) as patient:
                patient.send(of_band("batch", stream=True))
                begun = 0
                for n, cut in enumerate(cuts):
                    await until(lambda n=n: len(tellers.held) == 2 * n + 1)
                    tellers.tell(tellers.held[-1], WORDS[begun:cut])
                    last = WORDS[cut - 1].encode() if cut > begun else b"role"
                    if cut > begun or n == 0:
                        await read_until(patient, last)
                    begun = cut
                    urgent = group.create_task(front.ask(of_band("interactive")))
                    await preempted(front, n + 1)
                    await until(lambda n=n: len(tellers.held) == 2 * n + 2)
                    whole(tellers.held[-1])
                    assert (await urgent).status == 200
                await until(lambda: len(tellers.held) == 2 * len(cuts) + 1)
                tellers.finish(tellers.held[-1], begun)
                await read_until(patient, b"[DONE]\n\n")
            assert tellers.begun == [0, *cuts]

    run(main())


def test_the_whole_text_of_a_paused_stream_comes_once(tmp_path: Path) -> None:
    tellers = Tellers()

    async def main() -> None:
        async with cluster(tmp_path, worker(tellers, 1)) as front, asyncio.TaskGroup() as group:
            batch = group.create_task(front.ask(of_band("batch", stream=True)))
            await until(lambda: len(tellers.held) == 1)
            tellers.tell(tellers.held[0], WORDS[:4])
            async with asyncio.timeout(10):
                while await front.metric('forebay_replica_in_flight{model="chat",replica="chat-0"}') != 1:
                    await asyncio.sleep(0.005)
            urgent = group.create_task(front.ask(of_band("default")))
            await until(lambda: len(tellers.held) == 2)
            whole(tellers.held[1])
            assert (await urgent).status == 200
            await until(lambda: len(tellers.held) == 3)
            tellers.finish(tellers.held[2], tellers.begun[1])
            answer = await batch
            assert text_of(answer.body) == "".join(WORDS)
            assert answer.status == 200
            assert await front.metric('forebay_requests_total{code="ok",model="chat"}') == 2
            assert await front.metric('forebay_completion_tokens_total{model="chat"}') == 6
            assert await front.metric('forebay_in_flight{model="chat"}') == 0

    run(main())


def test_no_urgent_request_queues_behind_batch_work_in_an_engine(tmp_path: Path) -> None:
    tellers = Tellers()

    async def main() -> None:
        async with cluster(tmp_path, worker(tellers, 4)) as front, asyncio.TaskGroup() as group:
            batch = [group.create_task(front.ask(of_band("batch"))) for _ in range(6)]  # four run, two wait there
            await until(lambda: len(tellers.held) == 6)
            urgent = [group.create_task(front.ask(of_band("interactive")))]
            await preempted(front, 3)
            urgent += [group.create_task(front.ask(of_band("default"))) for _ in range(2)]
            await preempted(front, 5)
            await until(lambda: len(tellers.held) == 9)
            await until(lambda: len(tellers.gone) == 5)
            open_now = [each for each in tellers.held if not each.finished]
            assert [b"batch" in each.body for each in open_now] == [True, False, False, False]
            whole(open_now[1])
            assert (await urgent[0]).status == 200
            assert len(tellers.held) == 9, "one place is kept for the next urgent request"
            while not all(task.done() for task in (*urgent, *batch)):
                for each in tellers.held:
                    if not each.finished:
                        whole(each)
                await asyncio.sleep(0.005)
            assert {task.result().status for task in (*urgent, *batch)} == {200}

    run(main())


@pytest.mark.interpreted  # with stand-ins
def test_urgent_request_waits_when_batch_attempts_cannot_be_preempted() -> None:
    class Stays:
        yields = False

    link = SimpleNamespace(load=1, places=2, room=1, batch={Stays(): None}, batch_max=2.0)

    def choose(_: object) -> Route | Wait:
        return Route(0, Why.CHEAPEST) if link.batch else Wait(Why.FULL)

    relay: Any = SimpleNamespace(served=SimpleNamespace(links=[link], urgent_at=0.0))
    gateway: Any = SimpleNamespace(now=lambda: 1.0, choose=choose)
    assert isinstance(preempt_batch(gateway, relay, choose(relay)), Wait)


@pytest.mark.interpreted  # with stand-ins
def test_no_batch_work_gives_way_where_that_makes_no_room() -> None:
    class Attempt(NamedTuple):
        name: int
        yields: bool

    batch = {Attempt(n, n != 1): None for n in range(3)}
    link = SimpleNamespace(load=4, places=2, room=2, batch=batch, batch_max=9.0)

    def choose(_: object) -> Route | Wait:
        return Route(0, Why.CHEAPEST) if link.load - len(link.batch) < link.room else Wait(Why.FULL)

    relay: Any = SimpleNamespace(served=SimpleNamespace(links=[link], urgent_at=0.0))
    gateway: Any = SimpleNamespace(now=lambda: 1.0, choose=choose)
    assert isinstance(preempt_batch(gateway, relay, choose(relay)), Wait)
    assert [each.name for each in batch] == [0, 2]


@pytest.mark.parametrize("room_left", [True, False])
@pytest.mark.parametrize("index", [0, 1])
def test_batch_request_that_cannot_be_resumed_is_not_preempted(tmp_path: Path, room_left: bool, index: int) -> None:
    """Its replica says so, or it has a second choice."""
    tellers = Tellers()
    if not index:
        tellers.head = [EVENT_STREAM, (b"x-forebay-resumable", b"0")]
    batch_count = 1 if room_left else 3

    async def main() -> None:
        async with cluster(tmp_path, worker(tellers, 1)) as front, asyncio.TaskGroup() as group:
            batch = []
            for n in range(batch_count):
                batch.append(group.create_task(front.ask(of_band("batch", stream=True))))
                await until(lambda n=n: len(tellers.held) == n + 1)
                event = b'data: {"id":"x","created":17,"choices":[{"index":%d,"delta":{"content":"second"}}]}\n\n'
                tellers.held[n].write(event % index)
            async with asyncio.timeout(10):
                while await front.metric('forebay_replica_in_flight{model="chat",replica="chat-0"}') != batch_count:
                    await asyncio.sleep(0.005)
            urgent = group.create_task(front.ask(of_band("interactive")))
            if room_left:
                await until(lambda: len(tellers.held) == 2)
            else:
                async with asyncio.timeout(10):
                    while await front.metric('forebay_queue_depth{model="chat"}') != 1:
                        await asyncio.sleep(0.005)
            for exchange in tellers.held[:batch_count]:
                tellers.finish(exchange, 0)
            await until(lambda: len(tellers.held) == batch_count + 1)
            whole(tellers.held[-1])
            assert (await urgent).status == 200
            assert [(await each).status for each in batch] == [200] * batch_count
            assert await front.metric('forebay_preemptions_total{band="batch",model="chat"}') == 0

    run(main())


def test_record_counts_preemptions_of_a_request(tmp_path: Path) -> None:
    tellers = Tellers()

    async def main() -> list[Answer]:
        async with cluster(tmp_path, worker(tellers, 1)) as front, asyncio.TaskGroup() as group:
            batch = group.create_task(front.ask(of_band("batch")))
            for n in range(3):
                await until(lambda n=n: len(tellers.held) == 2 * n + 1)
                urgent = group.create_task(front.ask(of_band("system" if n else "default")))
                await until(lambda n=n: len(tellers.held) == 2 * n + 2)
                whole(tellers.held[-1])
                assert (await urgent).status == 200
            await until(lambda: len(tellers.held) == 7)
            whole(tellers.held[-1])
            answer = await batch
            assert await front.metric('forebay_preemptions_total{band="batch",model="chat"}') == 3
            return [answer]

    run(main())


def test_preempted_request_falls_back_like_one_that_only_waits(tmp_path: Path) -> None:
    held: list[Exchange] = []

    async def main() -> None:
        full, spare = worker(held.append, 1), Worker(whole, "spare-0", "spare")
        base = replace(ROUTES, fallback=(StandIn("spare"),), queue_timeout_s=1.0)
        async with working(full, spare):
            models = routes(full, base=base), routes(spare, base=replace(ROUTES, name="spare"))
            async with fronting(tmp_path, *models) as front, asyncio.TaskGroup() as group:
                await until(lambda: full.polls > 1 < spare.polls)
                asked = [group.create_task(front.ask(of_band("default"))) for _ in range(3)]
                await until(lambda: len(held) == 3)
                asked.append(group.create_task(front.ask(of_band("interactive"))))
                done, _ = await asyncio.wait(asked, timeout=10, return_when=asyncio.FIRST_COMPLETED)
                assert {each.result().headers[b"x-forebay-model"] for each in done} == {b"spare"}
                full.answer = whole
                for exchange in held:
                    whole(exchange)
                assert {(await each).status for each in asked} == {200}

    run(main())


class Busy(NamedTuple):
    """A replica as far as it matters for how its model is."""

    load: int
    batch: tuple[int, ...] = ()
    room: int = 4
    live: bool = True


@pytest.mark.interpreted
@pytest.mark.parametrize(
    ("replica", "waits", "band", "condition"),
    [
        (Busy(4, (1, 2, 3, 4)), Band.BATCH, Band.INTERACTIVE, Condition.FREE),
        (Busy(4, (1, 2, 3, 4)), None, Band.BATCH, Condition.SATURATED),
        (Busy(3, (1, 2, 3)), Band.BATCH, Band.BATCH, Condition.SATURATED),
        (Busy(4), None, Band.DEFAULT, Condition.SATURATED),
        (Busy(4, (1, 2)), Band.DEFAULT, Band.DEFAULT, Condition.SATURATED),
        (Busy(4, (1, 2), live=False), None, Band.DEFAULT, Condition.DOWN),
    ],
)
def test_model_running_only_batch_work_counts_as_free_for_fallback(
    replica: Busy, waits: Band | None, band: Band, condition: Condition
) -> None:
    model: Any = Model([replica], RequestQueue(9, 60.0))
    if waits is not None:
        model.waiting.enter("one", Ticket(waits), 0.0)
    assert dispatching.condition(model, band) is condition


class Model(NamedTuple):
    """One with such replicas."""

    links: list[Busy]
    waiting: RequestQueue[str]
