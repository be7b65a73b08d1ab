"""How the gateway routes by prompt: affinity, sessions, learning, and policies that change under way."""

import asyncio
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tests.gateway.rig import (
    CHAT,
    EVENT_STREAM,
    JSON,
    ROUTES,
    Front,
    Worker,
    chat,
    cluster,
    events,
    fronting,
    post,
    routes,
    whole,
    working,
)
from tests.net.rig import lone, run, until

from forebay.core.model import LoadReport, Policy, Replica, ReplicaState, Sessions, Task
from forebay.core.prefix.blocks import BLOCK_BYTES, blocks
from forebay.core.routing.speed import Lengths
from forebay.gateway.account import Account
from forebay.gateway.asking import routing_of, session_of
from forebay.gateway.fleet import Served
from forebay.gateway.link import Link
from forebay.net.client import Pool
from forebay.net.server import Exchange
from forebay.obs.metrics import Metrics
from forebay.wire.apis.request_fields import request_fields

CPR = replace(ROUTES, policy=Policy.CPR)
UP = 'forebay_replica_up{model="chat",replica="chat-%d"}'
LONG = "The history of the river and of all its mills. " * 60


def asked(body: bytes, **more: Any) -> Any:
    """What routing learns of a body."""
    fields = more.pop("fields", {})
    exchange = lone(b"POST", b"/", fields)
    routes = replace(ROUTES, task=more.pop("task", Task.CHAT))
    return routing_of(
        request_fields(body), b"req-1", routes=routes, lengths=Lengths(), session=session_of(exchange, routes)
    )


def conversation(*turns: str, **more: Any) -> bytes:
    """The body of a chat of several messages."""
    return chat(messages=[{"role": "user", "content": turn} for turn in turns], **more)


def test_continued_conversation_begins_with_its_earlier_blocks() -> None:
    first, second = asked(conversation(LONG)), asked(conversation(LONG, "And then?"))
    assert len(first.blocks) >= 5
    assert second.blocks[: len(first.blocks)] == first.blocks
    assert second.tokens > first.tokens


def test_different_prompt_beginnings_or_models_share_no_blocks() -> None:
    first, other = asked(conversation(LONG)), asked(conversation("x" + LONG))
    assert not set(first.blocks) & set(other.blocks)
    text = memoryview(b"a" * 3 * BLOCK_BYTES)
    assert not set(blocks(text, "a")) & set(blocks(text, "b"))


@pytest.mark.parametrize(
    ("more", "tokens"),
    [({}, 256.0), ({"max_tokens": 7}, 7), ({"max_completion_tokens": 9, "max_tokens": 7}, 9),
     ({"max_tokens": "many"}, 256.0), ({"max_tokens": -3}, 256.0), ({"max_tokens": 10**30}, 256.0)],
)  # fmt: skip
def test_expected_output_is_limited_by_max_tokens(more: dict[str, Any], tokens: float) -> None:
    assert asked(chat(**more)).output_tokens == tokens


def test_embedding_request_has_no_prefix_blocks_and_no_output() -> None:
    ask = asked(b'{"model":"chat","input":"' + b"x" * 4096 + b'"}', task=Task.EMBED)
    assert (ask.blocks, ask.output_tokens) == ((), 0.0)
    assert ask.tokens > 1000


def test_session_header_or_cookie_gives_the_routing_key() -> None:
    assert asked(chat()).key == 0
    keys = {asked(chat(), fields={b"x-forebay-session": name}).key for name in (b"a", b"a", b"b")}
    assert len(keys) == 2
    assert 0 not in keys


async def replica_of(front: Front, body: bytes, *fields: bytes) -> bytes:
    """Where a request was answered."""
    answer = await front.ask(post(body, b"/v1/chat/completions", *fields))
    assert answer.status == 200
    assert answer.headers[b"x-forebay-route"]
    assert int(answer.headers[b"x-forebay-queue-ms"]) >= 0
    return answer.headers[b"x-forebay-replica"]


def streaming(exchange: Exchange) -> None:
    """Answer with a stream, and with counts that fit the prompt; what was cached is not known."""
    exchange.start(200, [EVENT_STREAM])
    exchange.write(b'data: {"n":1}\n\ndata: [DONE]\n\n')
    exchange.end([(b"x-forebay-usage", b"%d,3," % (len(exchange.body) // 4))])


def at_once(exchange: Exchange) -> None:
    """Answer as a whole, with such counts."""
    exchange.respond(200, [JSON, (b"x-forebay-usage", b"%d,3," % (len(exchange.body) // 4))], b"{}")


@pytest.mark.parametrize(
    ("policy", "answer"),
    [  # not streaming by price: a replica that is seen to read a prompt in no time makes a cache worth nothing
        (Policy.CPR, at_once),
        (Policy.PREFIX_AFFINITY, at_once),
        (Policy.PREFIX_AFFINITY, streaming),
    ],
)
def test_conversation_is_routed_to_the_replica_caching_its_prefix(
    tmp_path: Path, policy: Policy, answer: Any
) -> None:
    async def main() -> None:
        workers = [Worker(answer, f"chat-{n}") for n in range(4)]
        async with cluster(tmp_path, *workers, base=replace(ROUTES, policy=policy)) as front:
            await until(lambda: all(worker.polls for worker in workers))
            homes = set()
            for topic in range(6):
                turns = [f"{topic}{LONG}"]
                seen = set()
                for turn in range(4):
                    seen.add(await replica_of(front, conversation(*turns)))
                    turns.append(f"turn {turn}")
                assert len(seen) == 1
                homes |= seen
            assert len(homes) > 1

    run(main())


def test_a_key_stays_at_one_replica_while_it_is_healthy_and_comes_back_with_it(tmp_path: Path) -> None:
    async def main() -> None:
        workers = [Worker(whole, f"chat-{n}") for n in range(4)]
        base = replace(ROUTES, policy=Policy.CONSISTENT_HASH)
        async with cluster(tmp_path, *workers, base=base) as front:
            await until(lambda: all(worker.polls for worker in workers))
            homes = {}
            for name in range(12):
                field = b"x-forebay-session: s%d" % name
                seen = {await replica_of(front, chat(), field) for _ in range(3)}
                assert len(seen) == 1
                homes[field] = seen.pop()
            assert len(set(homes.values())) > 1
            lost = workers[0]
            lost.report = replace(lost.report, state=ReplicaState.DRAINING)
            polls = lost.polls
            await until(lambda: lost.polls > polls + 2)
            moved = {field: await replica_of(front, chat(), field) for field in homes}
            assert all(moved[f] == home for f, home in homes.items() if home != b"chat-0")
            assert b"chat-0" not in moved.values()
            lost.report = replace(lost.report, state=ReplicaState.READY)
            polls = lost.polls
            await until(lambda: lost.polls > polls + 2)
            assert {field: await replica_of(front, chat(), field) for field in homes} == homes

    run(main())


def folder(path: Path) -> Path:
    """A new one."""
    path.mkdir()
    return path


async def known(front: Front, up: int) -> None:
    """Wait until the gateway knows so many replicas that take requests."""
    async with asyncio.timeout(10):
        while sum([await front.metric(UP % number) for number in range(4)]) != up:
            await asyncio.sleep(0.01)


def test_idle_sessions_move_too_when_their_replica_is_lost(tmp_path: Path) -> None:
    async def main() -> None:
        workers = [Worker(whole, f"chat-{n}") for n in range(4)]
        base = replace(ROUTES, sessions=Sessions.HEADER)
        async with (
            working(*workers),
            fronting(folder(tmp_path / "asked"), routes(*workers, base=base)) as asked,
            fronting(folder(tmp_path / "silent"), routes(*workers, base=base)) as silent,
        ):
            for front in (asked, silent):
                await front.ready()
                await known(front, up=4)
            fields = [b"x-forebay-session: s%d" % name for name in range(12)]
            began = {field: await replica_of(asked, chat(), field) for field in fields}
            assert {field: await replica_of(silent, chat(), field) for field in fields} == began
            lost = workers[0]
            lost.report = replace(lost.report, state=ReplicaState.DRAINING)
            for front in (asked, silent):
                await known(front, up=3)
                await replica_of(front, chat(), b"x-forebay-session: another")
            moved = {field: await replica_of(asked, chat(), field) for field in fields}
            lost.report = replace(lost.report, state=ReplicaState.READY)
            for front in (silent, asked):
                await known(front, up=4)
                assert {field: await replica_of(front, chat(), field) for field in fields} == moved

    run(main())


@pytest.mark.parametrize("policy", [Policy.CPR, Policy.ROUND_ROBIN])
def test_a_model_with_sessions_keeps_them_together_by_header_and_by_cookie(tmp_path: Path, policy: Policy) -> None:
    async def main() -> None:
        workers = [Worker(whole, f"chat-{n}") for n in range(4)]
        base = replace(ROUTES, policy=policy, sessions=Sessions.COOKIE)
        async with cluster(tmp_path, *workers, base=base) as front:
            await until(lambda: all(worker.polls for worker in workers))
            homes = set()
            for name in range(8):
                field = b"x-forebay-session: s%d" % name
                seen = {await replica_of(front, chat(), field) for _ in range(3)}
                assert len(seen) == 1
                homes |= seen
            assert len(homes) > 1

            for _ in range(4):
                first = await front.ask(post(chat(), b"/v1/chat/completions"))
                cookie = first.headers[b"set-cookie"].partition(b";")[0]
                field = b"cookie: a=b; %b; c=d" % cookie
                again = await front.ask(post(chat(), b"/v1/chat/completions", field))
                assert again.headers[b"x-forebay-replica"] == first.headers[b"x-forebay-replica"]
                assert again.headers[b"x-forebay-route"] == b"its session is there"
                assert b"set-cookie" not in again.headers

    run(main())


def test_a_session_stays_where_it_is_when_replicas_come_and_moves_once_when_its_own_goes(tmp_path: Path) -> None:
    async def main() -> None:
        workers = [Worker(whole, f"chat-{n}") for n in range(4)]
        first, more = workers[:2], workers[2:]
        base = replace(ROUTES, sessions=Sessions.HEADER)
        fields = [b"x-forebay-session: s%d" % n for n in range(16)]
        async with cluster(tmp_path, *first, base=base) as front, working(*more):
            await until(lambda: all(worker.polls for worker in first))
            before = [await replica_of(front, chat(), field) for field in fields]
            front.write(routes(*workers, base=base))
            await until(lambda: all(worker.polls for worker in more))
            await until_ready(front, 4)
            assert [await replica_of(front, chat(), field) for field in fields] == before
            assert {await replica_of(front, chat(), b"x-forebay-session: t%d" % n) for n in range(32)} > set(before)
            lost = first[0]
            lost.report = replace(lost.report, state=ReplicaState.DRAINING)
            await until_ready(front, 3)
            moved = [await replica_of(front, chat(), field) for field in fields]
            assert all(now == was for now, was in zip(moved, before, strict=True) if was != b"chat-0")
            assert b"chat-0" not in moved
            lost.report = replace(lost.report, state=ReplicaState.READY)
            await until_ready(front, 4)
            assert [await replica_of(front, chat(), field) for field in fields] == moved

    run(main())


async def until_ready(front: Front, count: int) -> None:
    async with asyncio.timeout(10):
        while sum([await front.metric(UP % n) for n in range(4)]) != count:
            await asyncio.sleep(0.005)


def test_a_session_waits_for_its_replica_without_blocking_others(tmp_path: Path) -> None:
    async def main() -> None:
        workers = [Worker(lambda _: None, f"chat-{n}") for n in range(2)]
        for worker in workers:
            worker.report = replace(worker.report, capacity=1)
        base = replace(ROUTES, sessions=Sessions.HEADER)
        async with cluster(tmp_path, *workers, base=base) as front:
            await until(lambda: all(worker.polls for worker in workers))
            async with asyncio.TaskGroup() as group:
                stays = post(chat(), CHAT, b"x-forebay-session: s")
                asked = [group.create_task(front.ask(stays)) for _ in range(5)]
                await until(lambda: any(len(worker.requests) == 3 for worker in workers))
                home, other = sorted(workers, key=lambda worker: -len(worker.requests))
                asked += [group.create_task(front.ask(post(chat(), CHAT))) for _ in range(3)]
                await until(lambda: len(other.requests) == 3)
                home.answer = other.answer = whole
                for exchange in [*other.requests, *home.requests]:
                    whole(exchange)
            assert {answer.result().status for answer in asked} == {200}
            assert (len(home.requests), len(other.requests)) == (5, 3)

    run(main())


def test_policies_change_while_requests_run(tmp_path: Path) -> None:
    async def main() -> None:
        held: list[Exchange] = []
        workers = [Worker(held.append, f"chat-{n}") for n in range(2)]
        async with cluster(tmp_path, *workers, base=CPR) as front, asyncio.TaskGroup() as group:
            await until(lambda: all(worker.polls for worker in workers))
            answers = []
            for policy in Policy:
                mark = replace(ROUTES, name=f"seen-{policy}")
                front.write(routes(*workers, base=replace(ROUTES, policy=policy)), mark)
                async with asyncio.timeout(10):
                    while (await front.get(b"/v1/models/%b" % mark.name.encode())).status != 200:
                        await asyncio.sleep(0.005)
                answers += [group.create_task(front.ask(post(chat()))) for _ in range(2)]
                await until(lambda: len(held) == len(answers))  # noqa: B023 - awaited at once
            for exchange in held:
                whole(exchange)
            assert {(await answer).status for answer in answers} == {200}

    run(main())


def test_routing_charges_are_zero_when_idle(tmp_path: Path) -> None:
    def hasty(exchange: Exchange) -> None:
        exchange.abort()

    async def main() -> None:
        workers = [Worker(handler, f"chat-{n}") for n, handler in enumerate((whole, events, hasty))]
        async with cluster(tmp_path, *workers, base=CPR) as front:
            await until(lambda: all(worker.polls for worker in workers))
            async with asyncio.TaskGroup() as group:
                for n in range(20):
                    group.create_task(front.ask(post(conversation(f"{n % 3}{LONG}"))))
            for worker in workers:
                assert (
                    await front.metric(f'forebay_replica_queue_tokens{{model="chat",replica="{worker.replica}"}}')
                    == 0
                )
            assert await front.metric('forebay_in_flight{model="chat"}') == 0

    run(main())


def test_handicaps_are_relative_to_the_healthiest_replica() -> None:
    async def scenario() -> None:
        async with asyncio.TaskGroup() as group:
            served = Served(CPR, Account(Metrics(), "chat"))
            links = [
                served.link(
                    Replica(f"chat-{n}", 1, "r", "127.0.0.1", 1, ReplicaState.READY), Pool("127.0.0.1", 1, group)
                )
                for n in range(3)
            ]

            def handicaps(now: float, *heard: Link) -> list[float]:
                for link in heard:
                    report = LoadReport(link.id, 1, "chat", "r", ReplicaState.READY)
                    assert served.apply_report(link, report, 0, now, now) == ""
                served.refresh(now)
                return [link.meter.handicap for link in links]

            assert handicaps(0.0) == [1.0] * 3, "nobody has been heard of"
            served.links = links
            assert handicaps(0.0, *links[:2]) == [1.0] * 3, "those that came together are not behind one another"
            assert (
                served.apply_report(links[2], LoadReport("chat-2", 1, "chat", "r", ReplicaState.READY), 0, 60.0, 60.0)
                == ""
            )
            assert links[2].meter.handicap == 5.0, "from its first load report on, not from the next refresh"
            assert handicaps(60.0) == [1.0, 1.0, 5.0]
            assert handicaps(75.0) == [1.0, 1.0, 3.0]
            assert handicaps(90.0) == [1.0] * 3

    run(scenario())
