"""A stream whose replica is lost goes on elsewhere: nothing repeated, nothing lost, one end."""

import asyncio
import itertools
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import msgspec
import pytest
from tests.gateway.rig import (
    CHAT,
    EVENT_STREAM,
    RETRYABLE,
    USAGE,
    Front,
    Worker,
    chat,
    cluster,
    failing,
    post,
    read_until,
    routes,
    working,
)
from tests.net.rig import peer, run, until

from forebay.core.model import RecordsSpec, ReplicaState
from forebay.core.resilience import DEFAULTS
from forebay.gateway.scheduling.retrying import STUCK_MAX
from forebay.net.server import Exchange, Handler
from forebay.wire import records
from forebay.wire.openai_answer import DONE, ChatAnswer, Head, Usage

WORDS = tuple(f" wörd{n}\n" for n in range(60))
TEXT = "".join(WORDS)
FIRST_ID, FIRST_CREATED = "chatcmpl-first", 17


class Story:
    """Tells WORDS as a stream of chat chunks; `cuts`: the words in all after which it dies, one for each attempt."""

    def __init__(self, *cuts: int, how: str = "abort") -> None:
        self.cuts: Iterator[int] = itertools.chain(cuts, itertools.repeat(len(WORDS)))
        self.how = how
        self.said: list[bytes] = []
        self.bodies: list[bytes] = []

    def __call__(self, exchange: Exchange) -> None:
        wanted = exchange.header(b"x-forebay-continue")
        assert exchange.header(b"x-forebay-gateway") == b"1"
        head, said = Head(f"chatcmpl-{len(self.said)}", 99, "chat", "r1"), b""
        if wanted is None:
            head = Head(FIRST_ID, FIRST_CREATED, "chat", "r1")
            self.bodies.append(exchange.body)
        else:
            id, created, size, *_ = wanted.decode().split(",")
            head = Head(id, int(created), "chat", "r1")
            cut = len(exchange.body) - int(size)
            said = exchange.body[cut:]
            self.bodies.append(exchange.body[:cut])
        self.said.append(said)
        self._tell(exchange, ChatAnswer(head, stream=True), said.decode(), not wanted)

    def _tell(self, exchange: Exchange, chunks: ChatAnswer, said: str, opening: bool) -> None:
        assert TEXT.startswith(said)
        begun = next(n for n in range(len(WORDS) + 1) if "".join(WORDS[:n]) == said)
        end = next(self.cuts)
        exchange.start(200, [EVENT_STREAM])
        if opening:
            exchange.write(chunks.opening(0))
        for word in WORDS[begun:end]:
            exchange.write(chunks.delta(0, word))
        if end < len(WORDS):
            exchange.write(chunks.delta(0, "never sent whole")[:-9])
            if self.how == "abort":
                exchange.abort()
            else:
                exchange.end([(b"x-forebay-error", self.how.encode())])
            return
        exchange.write(chunks.finish(0, "stop"))
        exchange.write(DONE)
        exchange.end([USAGE])


def contents(body: bytes) -> tuple[str, set[tuple[str, int]], int]:
    """Text, identities and opening chunks of a stream, which must be whole."""
    *events, done = body.removesuffix(b"\n\n").split(b"\n\n")
    assert done == b"data: [DONE]"
    chunks = [msgspec.json.decode(event.removeprefix(b"data: ")) for event in events]
    text = "".join(chunk["choices"][0]["delta"].get("content", "") for chunk in chunks)
    openings = sum("role" in chunk["choices"][0]["delta"] for chunk in chunks)
    assert [chunk["choices"][0]["finish_reason"] for chunk in chunks] == [None] * (len(chunks) - 1) + ["stop"]
    return text, {(chunk["id"], chunk["created"]) for chunk in chunks}, openings


@pytest.mark.parametrize("how", ["abort", "engine_failed"])
@pytest.mark.parametrize("cuts", [(0,), (1,), (40,), (0, 0), (5, 5, 23), (1, 2, 3, 4, 5, 6, 7, 8)])
def test_lost_stream_continues_seamlessly_on_another_replica(tmp_path: Path, cuts: tuple[int, ...], how: str) -> None:
    story = Story(*cuts, how=how)

    async def main() -> None:
        workers = [Worker(story, f"chat-{n}") for n in range(4)]
        async with cluster(tmp_path, *workers) as front:
            await until(lambda: all(worker.polls for worker in workers))
            answer = await front.ask(post(chat(stream=True)))
            assert contents(answer.body) == (TEXT, {(FIRST_ID, FIRST_CREATED)}, 1)
            assert [said.decode() for said in story.said] == ["", *("".join(WORDS[:cut]) for cut in cuts)]
            assert set(story.bodies) == {chat(stream=True)}
            reason = "lost" if how == "abort" else how
            assert await front.metric(f'forebay_resumes_total{{model="chat",reason="{reason}"}}') == len(cuts)
            assert await front.metric('forebay_requests_total{code="ok",model="chat"}') == 1
            assert await front.metric('forebay_completion_tokens_total{model="chat"}') == 3
            assert await front.metric('forebay_in_flight{model="chat"}') == 0
            await until(lambda: bool(front.lines()))
            assert [line["resumes"] for line in front.lines()] == [len(cuts)]

    run(main())


def test_a_stream_waits_for_a_replica_that_can_go_on(tmp_path: Path) -> None:
    story = Story(7)

    async def main() -> None:
        first, second = Worker(story), Worker(story, generation=2)
        async with cluster(tmp_path, first) as front, asyncio.TaskGroup() as group:
            asked = group.create_task(front.ask(post(chat(stream=True))))
            async with asyncio.timeout(10):
                while not story.said:
                    await asyncio.sleep(0.005)
            async with working(second):
                front.write(routes(second))
                assert contents((await asked).body)[0] == TEXT
        assert story.said == [b"", "".join(WORDS[:7]).encode()]

    run(main())


@pytest.mark.parametrize(
    "other", [failing(409, "not_resumable"), failing(400, "invalid_request"), failing(503, "overloaded", RETRYABLE)]
)
def test_a_stream_that_cannot_be_resumed_ends_with_one_error(tmp_path: Path, other: Handler) -> None:
    async def main() -> None:
        workers = [Worker(Story(*[3] * 50), "chat-0"), Worker(other, "chat-1")]
        async with cluster(tmp_path, *workers) as front, peer(front.port) as client:
            await until(lambda: all(worker.polls for worker in workers))
            client.send(post(chat(stream=True)))
            data = await client.rest()
            assert data.count(b'"error"') == 1
            assert b"stream_interrupted" in data
            assert not data.endswith(b"0\r\n\r\n")
            assert await front.metric('forebay_in_flight{model="chat"}') == 0

    run(main())


def test_a_stream_goes_on_elsewhere_after_a_response_that_is_no_stream(tmp_path: Path) -> None:
    story, garble = Story(3), failing(200, "ok")
    garbled: list[Exchange] = []

    def answer(exchange: Exchange) -> None:
        if exchange.header(b"x-forebay-continue") is None or len(garbled) == 2:
            story(exchange)
        else:
            garbled.append(exchange)
            garble(exchange)

    async def main() -> None:
        workers = [Worker(answer, f"chat-{n}") for n in range(4)]
        async with cluster(tmp_path, *workers) as front:
            await until(lambda: all(worker.polls for worker in workers))
            assert contents((await front.ask(post(chat(stream=True)))).body)[0] == TEXT
            assert len(garbled) == 2
            assert await front.metric('forebay_in_flight{model="chat"}') == 0

    run(main())


def test_a_replica_that_cannot_resume_a_stream_did_not_interrupt_it(tmp_path: Path) -> None:
    async def main() -> None:
        spec = RecordsSpec(str(tmp_path / "records"))
        workers = [Worker(Story(*[3] * 50), "chat-0"), Worker(failing(409, "not_resumable"), "chat-1")]
        async with cluster(tmp_path, *workers, records=spec) as front:
            await until(lambda: all(worker.polls for worker in workers))
            for _ in range(DEFAULTS.failures_max):
                async with peer(front.port) as client:
                    client.send(post(chat(stream=True), CHAT, b"connection: close"))
                    assert b"stream_interrupted" in await client.rest()
            breaker = 'forebay_replica_breaker{model="chat",replica="chat-1",state="closed"}'
            assert await front.metric(breaker) == 1

    run(main())
    (file,) = (tmp_path / "records").rglob("decisions-*.log")
    found = [d for p in records.payloads(file.read_bytes()).whole for d in records.decisions(p)]
    broken = [each for each in found if each.code == "stream_interrupted"]
    assert {tuple(each.outcome for each in decision.attempts) for decision in broken} == {("lost", "not_resumable")}


def test_a_stream_marked_not_resumable_is_not_resumed(tmp_path: Path) -> None:
    def lost(exchange: Exchange) -> None:
        chunks = ChatAnswer(Head(FIRST_ID, FIRST_CREATED, "chat", "r1"), stream=True)
        exchange.start(200, [EVENT_STREAM, (b"x-forebay-resumable", b"0")])
        exchange.write(chunks.opening(0) + chunks.delta(0, "{"))
        exchange.abort()

    async def main() -> None:
        workers = [Worker(lost, f"chat-{n}") for n in range(2)]
        async with cluster(tmp_path, *workers) as front, peer(front.port) as client:
            await until(lambda: all(worker.polls for worker in workers))
            client.send(post(chat(stream=True)))
            data = await client.rest()
            assert b"stream_interrupted" in data
            assert b"resumable" not in data
            assert sum(len(worker.requests) for worker in workers) == 1

    run(main())


def test_request_that_kills_every_replica_fails_after_the_retry_limit(tmp_path: Path) -> None:
    story = Story(*[3] * 50)

    async def main() -> None:
        workers = [Worker(story, f"chat-{n}") for n in range(2)]
        async with cluster(tmp_path, *workers) as front, peer(front.port) as client:
            client.send(post(chat(stream=True)))
            assert b"stream_interrupted" in await client.rest()
            assert len(story.said) == 1 + STUCK_MAX

    run(main())


def test_stream_ended_with_a_non_retryable_error_is_not_resumed(tmp_path: Path) -> None:
    story = Story(3, how="internal_error")

    async def main() -> None:
        workers = [Worker(story, f"chat-{n}") for n in range(2)]
        async with cluster(tmp_path, *workers) as front, peer(front.port) as client:
            client.send(post(chat(stream=True)))
            assert b"stream_interrupted" in await client.rest()
            assert len(story.said) == 1

    run(main())


def told_until(last: bytes, *, counted: bool) -> Handler:
    """Tells all of a text, and breaks off after `last` of its end."""

    def answer(exchange: Exchange) -> None:
        chunks = ChatAnswer(Head(FIRST_ID, FIRST_CREATED, "chat", "r1"), stream=True, include_usage=counted)
        exchange.start(200, [EVENT_STREAM])
        exchange.write(chunks.opening(0) + chunks.delta(0, "all"))
        end = chunks.finish(0, "stop") + chunks.end(Usage(1, 1))
        exchange.write(end[: end.index(last) + len(last)])
        exchange.abort()

    return answer


@pytest.mark.parametrize("last", [b'"stop"}]}\n\nda', b'"total_tokens":2}}\n\nda'])
def test_stream_missing_only_its_end_is_completed_by_the_gateway(last: bytes, tmp_path: Path) -> None:
    counted = b"tokens" in last

    async def main() -> None:
        workers = [Worker(told_until(last, counted=counted), f"chat-{n}") for n in range(2)]
        async with cluster(tmp_path, *workers) as front:
            answer = await front.ask(post(chat(stream=True)))
            assert b'"content":"all"' in answer.body
            assert answer.body.endswith(b"data: [DONE]\n\n")
            assert (b'"total_tokens":2' in answer.body) is counted
            assert sum(len(worker.requests) for worker in workers) == 1

    run(main())


@pytest.mark.parametrize("last", [b'"stop"}],"usage":null}\n\n', b'"usage":{"prompt'])
def test_stream_missing_its_token_counts_gets_them_from_another_replica(last: bytes, tmp_path: Path) -> None:
    broken = told_until(last, counted=True)
    said: list[bytes] = []

    def rest(exchange: Exchange) -> None:
        """The first one breaks off, the next one has nothing to add but the end."""
        if exchange.header(b"x-forebay-continue") is None:
            broken(exchange)
            return
        said.append(exchange.body[-3:])
        head = Head(FIRST_ID, FIRST_CREATED, "chat", "r1")
        chunks = ChatAnswer(head, stream=True, include_usage=True, begun="all")
        exchange.start(200, [EVENT_STREAM])
        exchange.write(chunks.finish(0, "stop") + chunks.end(Usage(5, 1)))
        exchange.end([(b"x-forebay-usage", b"5,1,0")])

    async def main() -> None:
        async with cluster(tmp_path, *(Worker(rest, f"chat-{n}") for n in range(2))) as front:
            body = (await front.ask(post(chat(stream=True)))).body
            assert said == [b"all"]
            assert [body.count(once) for once in (b'"all"', b'"stop"', b'"total_tokens":6', b"[DONE]")] == [1] * 4

    run(main())


def test_stream_whose_token_counts_nobody_can_give_is_complete_without(tmp_path: Path) -> None:
    broken = told_until(b'"stop"}],"usage":null}\n\n', counted=True)

    def refuse(exchange: Exchange) -> None:
        again = exchange.header(b"x-forebay-continue") is not None
        (failing(400, "not_resumable") if again else broken)(exchange)

    async def main() -> None:
        async with cluster(tmp_path, *(Worker(refuse, f"chat-{n}") for n in range(2))) as front:
            body = (await front.ask(post(chat(stream=True)))).body
            assert contents(body)[0] == "all"

    run(main())


async def reaches(front: Front, gauge: str, value: int) -> None:
    """Wait until a gauge of the model has that value."""
    async with asyncio.timeout(10):
        while await front.metric(f'forebay_{gauge}{{model="chat"}}') != value:
            await asyncio.sleep(0.005)


async def held_text(front: Front, words: int) -> None:
    """Wait until that many words are kept to resume a stream."""
    await reaches(front, "resume_text_bytes", len(msgspec.json.encode("".join(WORDS[:words]))) - 2)


def test_text_kept_of_unfinished_streams_is_reported(tmp_path: Path) -> None:
    held: list[Exchange] = []

    def pauses(exchange: Exchange) -> None:
        chunks = ChatAnswer(Head(FIRST_ID, FIRST_CREATED, "chat", "r1"), stream=True)
        exchange.start(200, [EVENT_STREAM])
        for word in WORDS[:20]:
            exchange.write(chunks.delta(0, word))
        held.append(exchange)

    async def main() -> None:
        async with cluster(tmp_path, Worker(pauses)) as front, peer(front.port) as client:
            await held_text(front, 0)
            client.send(post(chat(stream=True)))
            await held_text(front, 20)
            held[0].write(DONE)
            held[0].end([USAGE])
            await read_until(client, b"[DONE]")
            await held_text(front, 0)

    run(main())


def test_client_disconnect_while_waiting_for_resume_frees_everything(tmp_path: Path) -> None:
    def last_words(exchange: Exchange) -> None:
        worker.report = replace(worker.report, state=ReplicaState.WARMING)
        worker.polls = 0
        held.append(exchange)

    async def main() -> None:
        async with cluster(tmp_path, worker) as front:
            async with peer(front.port) as client:
                client.send(post(chat(stream=True)))
                await until(lambda: bool(held) and worker.polls > 1)  # by now the gateway knows that it is warming
                Story(3)(held[0])
                await read_until(client, WORDS[2].encode()[1:-1])
                await reaches(front, "queue_depth", 1)
                await held_text(front, 3)
            await reaches(front, "queue_depth", 0)
            await held_text(front, 0)
            assert await front.metric('forebay_requests_total{code="client_closed",model="chat"}') == 1

    held: list[Exchange] = []
    worker = Worker(last_words)
    run(main())
