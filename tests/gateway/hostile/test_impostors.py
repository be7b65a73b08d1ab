"""Another process in the name of a replica, at its address, with its generation."""

import asyncio
from dataclasses import replace
from pathlib import Path

from tests.gateway.rig import ROUTES, Worker, chat, cluster, post, until, whole
from tests.net.rig import run

from forebay.net.server import Exchange


def silent(exchange: Exchange) -> None:
    """Never answer."""


def test_what_waits_for_a_process_that_another_one_has_taken_the_place_of_goes_to_that_one(tmp_path: Path) -> None:
    async def main() -> None:
        worker = Worker(silent)
        worker.report = replace(worker.report, process="process-1")
        async with cluster(tmp_path, worker, base=ROUTES) as front, asyncio.TaskGroup() as tasks:
            asked = tasks.create_task(front.ask(post(chat())))
            await until(lambda: worker.requests)
            worker.answer, worker.report = whole, replace(worker.report, process="process-2")
            assert (await asked).status == 200
            assert len(worker.requests) == 2

    run(main())


def test_a_replica_that_does_not_say_which_process_it_is_keeps_what_it_has(tmp_path: Path) -> None:
    async def main() -> None:
        worker = Worker(silent)
        async with cluster(tmp_path, worker, base=ROUTES) as front, asyncio.TaskGroup() as tasks:
            asked = tasks.create_task(front.ask(post(chat())))
            await until(lambda: worker.requests)
            for name in ("", "process-1", "", "process-1"):
                worker.report, enough = replace(worker.report, process=name), worker.polls + 2
                await until(lambda enough=enough: worker.polls >= enough)
            whole(worker.requests[0])
            assert (await asked).status == 200
            assert len(worker.requests) == 1

    run(main())
