"""A gateway sends less to replicas that control calls slow, from the snapshot on that says so."""

import asyncio
from dataclasses import replace
from pathlib import Path

from tests.gateway.rig import ROUTES, Worker, chat, cluster, post, routes

from forebay.core.model import ModelRoutes, Policy

BASE = replace(ROUTES, policy=Policy.LEAST_REQUESTS)


def weighed(workers: tuple[Worker, ...], weights: tuple[float, ...]) -> ModelRoutes:
    plain = routes(*workers, base=BASE)
    pairs = zip(plain.replicas, weights, strict=True)
    return replace(plain, replicas=tuple(replace(each, weight=weight) for each, weight in pairs))


def test_round_robin_follows_replica_weights_of_the_current_snapshot(tmp_path: Path) -> None:
    workers = Worker(), Worker(replica="chat-1")

    async def test() -> None:
        async with asyncio.timeout(20), cluster(tmp_path, *workers, base=BASE) as front:

            async def asked(weights: tuple[float, float]) -> list[int]:
                front.write(weighed(workers, weights))
                before = [len(worker.requests) for worker in workers]
                slow = weights.index(min(weights))
                while True:  # until the gateway has the snapshot
                    seen = len(workers[slow].requests)
                    for _ in range(6):
                        assert (await front.ask(post(chat()))).status == 200
                    if len(workers[slow].requests) == seen:
                        return [len(worker.requests) - n for worker, n in zip(workers, before, strict=True)]

            first = await asked((1.0, 0.5))
            second = await asked((0.5, 1.0))
            assert first[0] >= 6
            assert second[1] >= 6

    asyncio.run(test())
