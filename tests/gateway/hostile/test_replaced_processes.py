"""Another process in the name of a replica, at its address, with its generation."""

import asyncio
from dataclasses import replace
from pathlib import Path

from tests.gateway.rig import ROUTES, Worker, chat, cluster, post, silent, until, whole
from tests.net.rig import run


def test_requests_of_a_replaced_worker_process_are_retried_at_its_successor(tmp_path: Path) -> None:
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


def test_replica_without_a_process_id_keeps_its_requests(tmp_path: Path) -> None:
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
