"""What workers report of their prefix caches reaches every gateway; what is nonsense harms nobody."""

import contextlib
from collections.abc import AsyncIterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import msgspec
import pytest
from tests.gateway.rig import JSON, ROUTES, Front, Worker, chat, cluster, fronting, post, routes, working
from tests.net.rig import run, until

from forebay.core.model import BlockNews, Policy
from forebay.core.prefix.blocks import CHANGES_MAX, blocks
from forebay.core.prefix.journal import Journal
from forebay.net.server import Exchange
from forebay.wire.apis.request_fields import prompt_text

LONG = "The history of the river and of all its mills. " * 60
AFFINITY = replace(ROUTES, policy=Policy.PREFIX_AFFINITY)
CPR = replace(ROUTES, policy=Policy.CPR)
START = BlockNews(5, True, False, (1, 2))


def at_once(exchange: Exchange) -> None:
    """Answer as a whole, with counts that fit the prompt; what was cached is not known."""
    exchange.respond(200, [JSON, (b"x-forebay-usage", b"%d,3," % (len(exchange.body) // 4))], b"{}")


@dataclass
class Telling(Worker):
    """A worker whose engine holds what it has read, and says so. `lies` are what it says instead, one each poll."""

    journal: Journal = field(default_factory=Journal)
    lies: list[bytes] = field(default_factory=list)
    asked: list[str] = field(default_factory=list)

    def handle(self, exchange: Exchange) -> None:
        if exchange.path != "/load":
            self.journal.apply(blocks(prompt_text(exchange.body), self.model), ())
            super().handle(exchange)
            return
        self.polls += 1
        self.asked.append(exchange.query)
        seq = exchange.query.removeprefix("blocks_since=")
        if not seq:
            exchange.respond(200, [JSON], msgspec.json.encode(self.report))
        elif self.lies:
            document = msgspec.json.encode(self.report).replace(b'"blocks":null', b'"blocks":' + self.lies.pop(0))
            exchange.respond(200, [JSON], document)
        else:
            news = self.journal.since(int(seq), estimated=False)
            exchange.respond(200, [JSON], msgspec.json.encode(replace(self.report, blocks=news)))

    async def told(self) -> None:
        """Until every gateway has heard of what is held now."""
        seq = self.journal.since(0, estimated=False).seq
        seen = len(self.asked)
        await until(lambda: self.asked[seen:].count(f"blocks_since={seq}") >= 4)


def conversation(*turns: str) -> bytes:
    """The body of a chat of several messages."""
    return chat(messages=[{"role": "user", "content": turn} for turn in turns])


async def replica_of(front: Front, *turns: str) -> str:
    """Which replica a conversation went to."""
    answer = await front.ask(post(conversation(*turns)))
    assert answer.status == 200
    return answer.headers[b"x-forebay-replica"].decode()


@contextlib.asynccontextmanager
async def two_gateways(folder: Path, *workers: Telling, base: Any) -> AsyncIterator[tuple[Front, Front]]:
    """Two gateways in front of the same workers."""
    async with cluster(folder, *workers, base=base) as one, fronting(folder, id="gateway-1") as other:
        await other.ready()
        for worker in workers:
            await worker.told()
        yield one, other


@pytest.mark.parametrize("base", [AFFINITY, CPR], ids=["affinity", "cpr"])
def test_conversation_keeps_its_replica_across_gateways(tmp_path: Path, base: Any) -> None:
    async def main() -> None:
        workers = [Telling(at_once, f"chat-{n}") for n in range(4)]
        async with two_gateways(tmp_path, *workers, base=base) as (one, other):
            homes = {topic: await replica_of(one, f"{topic}{LONG}") for topic in range(6)}
            assert len(set(homes.values())) > 1
            for worker in workers:
                await worker.told()
            for topic, home in reversed(homes.items()):  # in turn they would go elsewhere
                assert await replica_of(other, f"{topic}{LONG}", "And then?") == home

    run(main())


def test_new_gateway_learns_the_prefix_caches_of_replicas(tmp_path: Path) -> None:
    async def main() -> None:
        workers = [Telling(at_once, f"chat-{n}") for n in range(4)]
        async with working(*workers):
            async with fronting(tmp_path, routes(*workers, base=AFFINITY)) as first:
                await first.ready()
                homes = {topic: await replica_of(first, f"{topic}{LONG}") for topic in range(4)}
            async with fronting(tmp_path, id="gateway-1") as second:
                await second.ready()
                for worker in workers:
                    await worker.told()
                for topic, home in reversed(homes.items()):
                    assert await replica_of(second, f"{topic}{LONG}", "And then?") == home

    run(main())


def test_evicted_prefix_attracts_no_request(tmp_path: Path) -> None:
    async def main() -> None:
        workers = [Telling(at_once, f"chat-{n}") for n in range(2)]
        async with cluster(tmp_path, *workers, base=AFFINITY) as front:
            home = await replica_of(front, LONG)
            assert await replica_of(front, "x" + LONG) != home  # if both were alike, the one used before is next
            loser, other = workers if home == "chat-0" else workers[::-1]
            await loser.told()
            loser.journal.clear()
            other.journal.apply(blocks(prompt_text(conversation(LONG)), "chat"), ())
            await loser.told()
            await other.told()
            assert await replica_of(front, LONG) == other.replica

    run(main())


def test_prefix_blocks_are_polled_only_for_prefix_routing_policies(tmp_path: Path) -> None:
    async def main() -> None:
        worker = Telling(at_once)
        async with cluster(tmp_path, worker) as front:
            await until(lambda: worker.polls > 2)
            assert set(worker.asked) == {""}
            front.write(routes(worker, base=CPR))
            await worker.told()

    run(main())


def news(**fields: Any) -> bytes:
    """A report of blocks, good but for these fields."""
    return msgspec.json.encode({**msgspec.to_builtins(START), **fields})


LIES = {
    "no report": b'"x"',
    "no list": news(stored="x"),
    "no numbers": news(stored=["x"]),
    "fractions": news(stored=[1.5]),
    "below zero": news(stored=[-1]),
    "too large a number": news(stored=[2**64]),
    "a very large number": news(removed=[10**4000]),
    "too many": news(stored=list(range(CHANGES_MAX + 1))),
    "far too many": news(stored=[7] * 10**6),
    "too deep": b"[" * 5000 + b"]" * 5000,
    "no beginning": news(reset=False),
    "number too large": news(seq=2**63),
    "number zero": news(seq=0),
}


@pytest.mark.parametrize("lie", LIES.values(), ids=LIES)
def test_invalid_block_report_is_ignored_and_the_replica_keeps_serving(tmp_path: Path, lie: bytes) -> None:
    async def main() -> None:
        liar = Telling(at_once, lies=[lie])
        async with cluster(tmp_path, liar, base=AFFINITY) as front:
            await until(lambda: liar.asked[-2:] == ["", ""])
            assert await replica_of(front, LONG) == "chat-0"
            assert "blocks_since=5" not in liar.asked

    run(main())


def test_decreasing_block_sequence_number_discards_the_reports(tmp_path: Path) -> None:
    async def main() -> None:
        liar = Telling(at_once, lies=[news(), news(reset=False, seq=6, stored=[3]), news(reset=False, seq=2)])
        async with cluster(tmp_path, liar, base=AFFINITY) as front:
            await until(lambda: liar.asked[-2:] == ["", ""])
            assert [query for query in liar.asked if query] == [f"blocks_since={seq}" for seq in (0, 5, 6)]
            assert await replica_of(front, LONG) == "chat-0"

    run(main())
