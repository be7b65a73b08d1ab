"""Requests that wait for the replica that holds their prompt: when all others are nearly full, and not for long."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import pytest
from tests.gateway.rig import CHAT, JSON, ROUTES, Front, Worker, chat, cluster, post
from tests.net.rig import Answer, peer, run, until

from forebay.core.model import ModelRoutes, Policy
from forebay.core.routing import Why
from forebay.gateway import link
from forebay.net.server import Exchange

PROMPT = "The history of the river and of all its mills. " * 1000
CPR = replace(ROUTES, policy=Policy.CPR)
PLACES, KV_TOKENS = 100, 1000


def answered(exchange: Exchange) -> None:
    """Answer as a whole, with counts that fit the prompt."""
    exchange.respond(200, [JSON, (b"x-forebay-usage", b"%d,3," % (len(exchange.body) // 4))], b"{}")


class Scene(NamedTuple):
    """Two replicas, of which `home` holds the prompt."""

    front: Front
    home: Worker
    other: Worker

    async def ask(self, *fields: bytes, prompt: str = PROMPT) -> Answer:
        return await self.front.ask(post(chat(messages=[{"role": "user", "content": prompt}]), CHAT, *fields))

    async def waiting(self, depth: int) -> None:
        async with asyncio.timeout(10):
            while await self.front.metric('forebay_queue_depth{model="chat"}') != depth:
                await asyncio.sleep(0.002)


async def tell(worker: Worker, *, running: int = 0, waiting: int = 0, kv_share: float = 0.0) -> None:
    """Let a replica report this, and the gateway hear it."""
    worker.report = replace(
        worker.report, running=running, waiting=waiting, in_flight=running + waiting,
        kv_used_tokens=int(kv_share * KV_TOKENS), kv_total_tokens=KV_TOKENS,
    )  # fmt: skip
    polls = worker.polls
    await until(lambda: worker.polls > polls + 2)


@asynccontextmanager
async def full_home(tmp_path: Path, base: ModelRoutes = CPR, *, other_kv_share: float = 0.85) -> AsyncIterator[Scene]:
    """Where the prompt is held nothing has room any more, and elsewhere there is not much left."""
    workers = [Worker(answered, f"chat-{n}") for n in range(2)]
    for each in workers:
        each.report = replace(each.report, capacity=PLACES)
    async with cluster(tmp_path, *workers, base=base) as front:
        await until(lambda: all(each.polls for each in workers))
        scene = Scene(front, *workers)
        answer = await scene.ask()
        if answer.headers[b"x-forebay-replica"] == b"chat-1":
            scene = Scene(front, *reversed(workers))
        await tell(scene.other, running=10, kv_share=other_kv_share)
        await tell(scene.home, running=50, waiting=9, kv_share=0.9)
        yield scene


def at(answer: Answer) -> str:
    assert answer.status == 200
    return answer.headers[b"x-forebay-replica"].decode()


def test_request_is_held_for_the_replica_that_caches_its_prompt_with_that_reason(tmp_path: Path) -> None:
    async def main() -> None:
        async with full_home(tmp_path) as scene, peer(scene.front.port) as client:
            client.send(post(chat(messages=[{"role": "user", "content": PROMPT}])))
            await scene.waiting(1)
            assert at(await scene.ask(prompt="Hello")) == scene.other.replica  # who does not mind goes ahead
            await tell(scene.home, running=40, kv_share=0.8)
            answer = await client.answer()
            assert at(answer) == scene.home.replica
            assert answer.headers[b"x-forebay-route"].decode() == Why.HELD

    run(main())


def test_no_request_is_held_while_memory_is_free_or_the_queue_is_full(tmp_path: Path) -> None:
    async def main(base: ModelRoutes, other_kv_share: float, path: Path) -> None:
        path.mkdir()
        async with full_home(path, base, other_kv_share=other_kv_share) as scene:
            assert at(await scene.ask()) == scene.other.replica

    run(main(CPR, 0.5, tmp_path / "spare"))
    run(main(replace(CPR, queue_max=0), 0.85, tmp_path / "place"))
    run(main(replace(CPR, policy=Policy.PREFIX_AFFINITY), 0.85, tmp_path / "policy"))


def test_held_request_goes_elsewhere_after_half_of_its_deadline(tmp_path: Path) -> None:
    async def main() -> None:
        async with full_home(tmp_path) as scene:
            answer = await scene.ask(b"x-forebay-deadline-ms: 400")
            assert at(answer) == scene.other.replica
            assert int(answer.headers[b"x-forebay-queue-ms"]) > 0

    run(main())


@pytest.mark.interpreted
def test_a_request_is_not_held_for_long_for_a_replica_that_stays_full(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(link, "HOLD_S", 0.05)

    async def main() -> None:
        async with full_home(tmp_path) as scene:
            assert at(await scene.ask()) == scene.other.replica

    run(main())


def test_lower_bands_do_not_overtake_a_held_request(tmp_path: Path) -> None:
    async def main() -> None:
        async with full_home(tmp_path) as scene, peer(scene.front.port) as first, peer(scene.front.port) as second:
            first.send(post(chat(messages=[{"role": "user", "content": PROMPT}])))
            await scene.waiting(1)
            second.send(post(chat(), CHAT, b"x-forebay-priority: batch"))
            await scene.waiting(2)
            assert at(await scene.ask(b"x-forebay-priority: interactive", prompt="Hello")) == scene.other.replica
            await tell(scene.home, running=40, kv_share=0.8)
            assert at(await first.answer()) == scene.home.replica
            assert (await second.answer()).status == 200

    run(main())
