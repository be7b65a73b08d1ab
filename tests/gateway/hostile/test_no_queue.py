"""A model for which nobody may wait."""

import asyncio
import contextlib
from collections.abc import AsyncIterator
from dataclasses import dataclass, replace
from pathlib import Path

from tests.gateway.rig import CHAT, ROUTES, Front, Worker, chat, fronting, post, routes, silent, whole, working
from tests.net.rig import peer, run, until

BATCH = post(chat(), CHAT, b"x-forebay-priority: batch")
URGENT = post(chat(), CHAT, b"x-forebay-priority: interactive")


async def status(front: Front, request: bytes) -> int:
    return (await front.ask(request)).status


@dataclass
class Full:
    """A gateway that has let in as many as it may."""

    front: Front
    worker: Worker
    group: asyncio.TaskGroup
    asked: list[asyncio.Task[int]]
    """Requests that the worker has; none is answered."""


@contextlib.asynccontextmanager
async def full(folder: Path) -> AsyncIterator[Full]:
    worker = Worker(silent)
    worker.report = replace(worker.report, capacity=1)
    base = replace(ROUTES, queue_max=0)
    async with (
        working(worker),
        fronting(folder, routes(worker, base=base)) as front,
        asyncio.TaskGroup() as group,
    ):
        await front.ready()
        await until(lambda: worker.polls > 1)
        asked: list[asyncio.Task[int]] = []
        while not any(task.done() for task in asked):
            before = len(worker.requests)
            asked.append(task := group.create_task(status(front, BATCH)))
            await until(lambda: task.done() or len(worker.requests) > before)  # noqa: B023 - awaited at once
        assert asked.pop().result() == 429
        yield Full(front, worker, group, asked)


def test_urgent_requests_preempt_batch_where_no_queue_is_allowed(tmp_path: Path) -> None:
    async def main() -> None:
        async with full(tmp_path) as given:
            worker, asked = given.worker, given.asked
            urgent = given.group.create_task(status(given.front, URGENT))
            await until(lambda: len(worker.requests) > len(asked))
            worker.answer = whole
            for exchange in list(worker.requests):
                whole(exchange)
            async with asyncio.timeout(10):
                assert await urgent == 200
                assert [await task for task in asked] == [200] * len(asked)

    run(main())


def test_pipelined_request_takes_the_place_of_the_one_before(tmp_path: Path) -> None:
    async def main() -> None:
        async with full(tmp_path) as given:
            worker, others = given.worker, given.asked
            whole(worker.requests.pop())
            assert await others.pop() == 200  # there is room for one now
            async with peer(given.front.port) as client:
                client.send(BATCH * 2)
                for _ in range(2):
                    await until(lambda: len(worker.requests) > len(others))
                    whole(worker.requests.pop())
                    assert (await client.answer()).status == 200
            worker.answer = whole
            for exchange in worker.requests:
                whole(exchange)
            assert [await task for task in others] == [200] * len(others)

    run(main())
