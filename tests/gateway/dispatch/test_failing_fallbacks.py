"""A model that steps in refuses what its own model could serve: that is no answer for the client."""

import asyncio
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tests.gateway.dispatch.test_dispatch import ask, naming, served_by, serving, worker
from tests.gateway.rig import RETRYABLE, error_code, failing
from tests.net.rig import run, until

from forebay.core.model import StandIn
from forebay.net.server import Exchange

TOO_LONG, UNABLE = failing(400, "context_length_exceeded"), failing(400, "unsupported_parameter")
CHAIN: dict[str, Any] = {"fallback": (StandIn("small"), StandIn("tiny"))}


@pytest.mark.parametrize("stream", [False, True])
def test_fallback_that_cannot_serve_leads_to_the_next_and_then_to_the_original_rejection(
    tmp_path: Path, stream: bool
) -> None:
    held: list[Exchange] = []

    async def main() -> None:
        big, small, tiny = worker("big", held.append), worker("small", TOO_LONG), worker("tiny")
        big.report = replace(big.report, capacity=1)
        async with (
            serving(tmp_path, (big, {**CHAIN, "queue_max": 0}), (small, {}), (tiny, {})) as front,
            asyncio.TaskGroup() as group,
        ):
            first = [group.create_task(ask(front, "big")) for _ in range(3)]
            await until(lambda: len(held) == 3)
            assert served_by(await ask(front, "big", stream=stream)) == ("tiny", "big is saturated")
            tiny.answer = UNABLE
            answer = await ask(front, "big", stream=stream)
            assert (answer.status, error_code(answer)) == (429, "queue_full")
            assert answer.headers[b"x-forebay-model"] == b"big"
            assert int(answer.headers[b"retry-after"]) > 0
            assert await front.metric('forebay_requests_total{code="queue_full",model="big"}') == 1
            for name, trouble, count in (
                ("big", "saturated", 2),
                ("small", "saturated", 0),
                ("small", "context_length_exceeded", 2),
                ("tiny", "unsupported_parameter", 1),
            ):
                assert await front.metric(f'forebay_fallbacks_total{{model="{name}",trouble="{trouble}"}}') == count
            assert error_code(await ask(front, "small")) == "context_length_exceeded", "it was asked for itself"
            for exchange in held:
                naming(exchange)
            assert {served_by(await each)[0] for each in first} == {"big"}
            for name in ("big", "small", "tiny"):
                assert await front.metric(f'forebay_in_flight{{model="{name}"}}') == 0

    run(main())


def test_a_rejected_request_goes_to_its_own_model_if_that_is_free_when_the_fallback_refuses(tmp_path: Path) -> None:
    held: list[Exchange] = []
    late: list[Exchange] = []

    async def main() -> None:
        big, small = worker("big", held.append), worker("small", late.append)
        big.report = replace(big.report, capacity=1)
        settings = {"fallback": (StandIn("small"),), "queue_max": 0}
        async with serving(tmp_path, (big, settings), (small, {})) as front, asyncio.TaskGroup() as group:
            first = [group.create_task(ask(front, "big")) for _ in range(3)]
            await until(lambda: len(held) == 3)
            rejected = group.create_task(ask(front, "big"))
            await until(lambda: len(late) == 1)
            big.answer = naming
            for exchange in held:
                naming(exchange)
            assert {served_by(await each)[0] for each in first} == {"big"}
            UNABLE(late[0])
            assert served_by(await rejected) == ("big", "small refuses it")

    run(main())


def test_a_request_that_failed_at_its_own_model_is_not_sent_there_again_when_the_fallback_refuses(
    tmp_path: Path,
) -> None:
    async def main() -> None:
        big, small = worker("big", failing(503, "request_failed", RETRYABLE)), worker("small", UNABLE)
        async with serving(tmp_path, (big, {"fallback": (StandIn("small"),)}), (small, {})) as front:
            answer = await ask(front, "big")
            assert (answer.status, error_code(answer)) == (503, "request_failed")
            assert (len(big.requests), len(small.requests)) == (1, 1)

    run(main())


def test_a_request_with_time_left_keeps_waiting_for_its_own_model(tmp_path: Path) -> None:
    held: list[Exchange] = []

    async def main() -> None:
        big, small = worker("big", held.append), worker("small", UNABLE)
        big.report = replace(big.report, capacity=1)
        settings = {"fallback": (StandIn("small"),), "queue_timeout_s": 2.0}
        async with serving(tmp_path, (big, settings), (small, {})) as front, asyncio.TaskGroup() as group:
            first = [group.create_task(ask(front, "big")) for _ in range(3)]
            await until(lambda: len(held) == 3)
            waits = [group.create_task(ask(front, "big")) for _ in range(2)]
            await until(lambda: len(small.requests) == 2)
            big.answer = naming
            for exchange in held:
                naming(exchange)
            assert {served_by(await each) for each in waits} == {("big", "small refuses it")}
            assert {served_by(await each)[0] for each in first} == {"big"}
            assert len(small.requests) == 2

    run(main())


def test_a_request_that_its_own_model_refuses_too_gets_that_error_once(tmp_path: Path) -> None:
    held: list[Exchange] = []
    big, small = worker("big", held.append), worker("small", TOO_LONG)

    def refusing(exchange: Exchange) -> None:
        answer = UNABLE if len(big.requests) < 10 else naming
        answer(exchange)

    async def main() -> None:
        big.report = replace(big.report, capacity=1)
        settings = {"fallback": (StandIn("small"),), "queue_timeout_s": 2.0}
        async with serving(tmp_path, (big, settings), (small, {})) as front, asyncio.TaskGroup() as group:
            first = [group.create_task(ask(front, "big")) for _ in range(3)]
            await until(lambda: len(held) == 3)
            late = group.create_task(ask(front, "big"))
            await until(lambda: len(small.requests) == 1)
            big.answer = refusing
            for exchange in held:
                naming(exchange)
            answer = await late
            assert (answer.status, error_code(answer)) == (400, "unsupported_parameter")
            assert (len(big.requests), len(small.requests)) == (4, 1)
            assert {served_by(await each)[0] for each in first} == {"big"}

    run(main())


def test_a_request_that_is_invalid_for_every_model_is_rejected_by_the_fallback(tmp_path: Path) -> None:
    async def main() -> None:
        big, small = worker("big", Exchange.abort), worker("small", failing(400, "invalid_request"))
        async with serving(tmp_path, (big, CHAIN), (small, {})) as front:
            assert error_code(await ask(front, "big")) == "invalid_request"

    run(main())
