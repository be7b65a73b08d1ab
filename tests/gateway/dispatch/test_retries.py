"""What is repeated when engines die or fail on requests, and how often."""

import asyncio
from dataclasses import replace
from pathlib import Path

from tests.gateway.rig import RETRYABLE, Worker, chat, cluster, error_code, failing, post, whole
from tests.net.rig import run, until

from forebay.core.model import ReplicaState
from forebay.net.server import Exchange


def restarting(deaths: int) -> Worker:
    """The only replica, whose engine dies of the first requests, and is ready again a little later."""

    def answer(exchange: Exchange) -> None:
        if len(worker.requests) > deaths:
            whole(exchange)
            return
        worker.report = replace(worker.report, state=ReplicaState.WARMING)
        asyncio.get_running_loop().call_later(0.1, ready)
        failing(503, "engine_failed", RETRYABLE)(exchange)

    def ready() -> None:
        worker.report = replace(worker.report, state=ReplicaState.READY)

    worker = Worker(answer)
    return worker


def test_request_waits_for_the_restarted_engine_of_its_only_replica(tmp_path: Path) -> None:
    async def main() -> None:
        worker = restarting(deaths=1)
        async with cluster(tmp_path, worker) as front:
            assert (await front.ask(post(chat()))).status == 200
            assert len(worker.requests) == 2
            assert await front.metric('forebay_retries_total{model="chat",reason="engine_failed"}') == 1
            assert await front.metric('forebay_in_flight{model="chat"}') == 0

    run(main())


def test_request_that_killed_two_engines_of_a_replica_is_not_retried_there(tmp_path: Path) -> None:
    async def main() -> None:
        worker = restarting(deaths=5)
        async with cluster(tmp_path, worker) as front:
            answer = await front.ask(post(chat()))
            assert (answer.status, error_code(answer), len(worker.requests)) == (503, "engine_failed", 2)
            assert (await front.ask(post(chat()))).status == 503
            assert len(worker.requests) == 4

    run(main())


def test_retries_count_against_the_budget_except_after_engine_deaths(
    tmp_path: Path,
) -> None:
    asked, floor, share = 100, 30, 0.2

    async def main() -> None:
        bad = [Worker(failing(503, "request_failed", RETRYABLE), f"chat-{n}") for n in range(2)]
        async with cluster(tmp_path, *bad) as front:
            await until(lambda: all(worker.polls for worker in bad))
            answers = [await front.ask(post(chat())) for _ in range(asked)]
            assert {(answer.status, error_code(answer)) for answer in answers} == {(503, "request_failed")}
            repeated = sum(len(worker.requests) for worker in bad) - asked
            assert floor <= repeated <= floor + share * asked
            for worker in bad:
                worker.answer = failing(503, "engine_failed", RETRYABLE)
            assert (await front.ask(post(chat()))).status == 503
            assert await front.metric('forebay_retries_total{model="chat",reason="engine_failed"}') >= 1

    run(main())
