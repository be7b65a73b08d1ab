"""Which revision a request goes to while one is rolled out, and where it goes instead."""

import asyncio
import itertools
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from random import Random
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
from tests.gateway.rig import RETRYABLE, ROUTES, Front, Worker, failing, post, whole, working
from tests.gateway.splitting.rig import (
    CANARY,
    ROLLOUT,
    STABLE,
    ask,
    canary,
    ids,
    metric,
    observed,
    revision,
    said,
    split,
    splitting,
    stable,
    turn,
    up,
)
from tests.net.rig import run, until

from forebay.core.model import Policy, ReplicaState, Sessions, Split, Sticky, Task
from forebay.core.rollout.sides import side_of
from forebay.core.rollout.values import Arm
from forebay.gateway.rollout.arms import kind_of
from forebay.net.server import Exchange

HALF = split(0.5)
OURS, THEIRS = next(ids(Arm.STABLE, 0.5)), next(ids(Arm.CANARY, 0.5))
"""Ids of requests that go to `r1`, and to `r2`."""


class Held:
    """Answers when it is told to."""

    def __init__(self) -> None:
        self.waiting: list[Exchange] = []

    def __call__(self, exchange: Exchange) -> None:
        self.waiting.append(exchange)

    def free(self) -> None:
        for exchange in self.waiting:
            whole(exchange)
        self.waiting.clear()


def cut(exchange: Exchange) -> None:
    """Cut the connection without a word."""
    exchange.abort()


async def answers(front: Front, *requests: bytes) -> list[str]:
    """The revisions that answer these requests, one after the other."""
    found = []
    for each in requests:
        answer = await front.ask(each)
        assert answer.status == 200
        found.append(revision(answer))
    return found


def test_revision_of_a_request_is_drawn_by_its_id(tmp_path: Path) -> None:
    async def main() -> None:
        async with splitting(tmp_path, split(0.3), stable(whole), canary(whole)) as front:
            for id in (f"id-{n}" for n in range(60)):
                answer = await front.ask(ask(id))
                arm = side_of(id, ROLLOUT, 0.3)
                assert revision(answer) == (CANARY if arm is Arm.CANARY else STABLE)
                assert answer.headers[b"x-forebay-route"].decode().endswith(f"; {arm}")

    run(main())


@pytest.mark.parametrize(("share", "wanted"), [(0.0, STABLE), (1.0, CANARY)])
def test_share_of_zero_or_one_sends_all_requests_to_one_revision(tmp_path: Path, share: float, wanted: str) -> None:
    async def main() -> None:
        async with splitting(tmp_path, split(share), stable(whole), canary(whole)) as front:
            assert set(await answers(front, *(ask(f"id-{n}") for n in range(20)))) == {wanted}

    run(main())


@pytest.mark.parametrize("share", [0.0, 0.5, 1.0])
def test_a_request_that_names_a_revision_gets_it_and_adds_no_sample(tmp_path: Path, share: float) -> None:
    async def main() -> None:
        async with splitting(tmp_path, split(share), stable(whole), canary(whole)) as front:
            for wanted in (STABLE, CANARY):
                answer = await front.ask(ask(model=f"chat@{wanted}"))
                assert revision(answer) == wanted
                assert ";" not in answer.headers[b"x-forebay-route"].decode()
            assert (await observed(front)).samples == ()

    run(main())


@pytest.mark.parametrize(
    ("share", "mine", "gone", "wanted"),
    [
        (0.0, OURS, STABLE, CANARY),
        (0.5, OURS, STABLE, CANARY),
        (0.5, THEIRS, CANARY, STABLE),
        (1.0, THEIRS, CANARY, STABLE),
    ],
)
def test_revision_without_a_live_replica_is_replaced_by_the_other(
    tmp_path: Path, share: float, mine: str, gone: str, wanted: str
) -> None:
    async def main() -> None:
        one, two = stable(whole), canary(whole)
        async with splitting(tmp_path, split(share), one, two) as front:
            (one if gone == STABLE else two).state = ReplicaState.DRAINING
            await turn(front, split(share), one, two)
            answer = await front.ask(ask(mine))
            assert revision(answer) == wanted
            assert ";" not in answer.headers[b"x-forebay-route"].decode()
            assert (await observed(front)).samples == ()  # it did not go where it was meant to go

    run(main())


@asynccontextmanager
async def crowded(
    folder: Path, given: Split, full: str, busy: int = 1
) -> AsyncIterator[tuple[Front, Worker, Worker, Held]]:
    """Two replicas with one place each and two seats behind it; all of one revision are taken."""
    held = Held()
    one, two = stable(held if full == STABLE else whole), canary(held if full == CANARY else whole)
    for worker in (one, two):
        worker.report = replace(worker.report, capacity=busy)
    async with splitting(folder, given, one, two) as front, asyncio.TaskGroup() as group:
        seats = busy + 2
        tasks = [group.create_task(front.ask(ask(model=f"chat@{full}"))) for _ in range(seats)]
        await until(lambda: len(held.waiting) == seats)
        yield front, one, two, held
        held.free()
        for task in tasks:
            assert (await task).status == 200


def test_the_share_of_a_full_canary_goes_to_stable_and_does_not_wait(tmp_path: Path) -> None:
    async def main() -> None:
        async with crowded(tmp_path, HALF, CANARY) as (front, _, _, _):
            assert await answers(front, ask(THEIRS)) == [STABLE]

    run(main())


@pytest.mark.parametrize(("share", "full", "mine"), [(0.0, STABLE, OURS), (0.5, STABLE, OURS), (1.0, CANARY, THEIRS)])
def test_requests_wait_for_their_revision_while_the_other_one_is_idle(
    tmp_path: Path, share: float, full: str, mine: str
) -> None:
    async def main() -> None:
        async with crowded(tmp_path, split(share), full) as (front, one, two, held), asyncio.TaskGroup() as group:
            waits = group.create_task(front.ask(ask(mine)))
            await metric(front, 'queue_depth{model="chat"}', 1)
            idle = two if full == STABLE else one
            assert not idle.requests
            if share == 0.5:  # who waits is in nobody's way whose revision is idle
                assert await answers(front, ask(THEIRS)) == [CANARY]
            held.free()
            (one if full == STABLE else two).answer = whole
            assert revision(await waits) == full

    run(main())


def test_a_request_queued_for_stable_goes_to_the_canary_at_full_share(tmp_path: Path) -> None:
    async def main() -> None:
        async with crowded(tmp_path, HALF, STABLE) as (front, one, two, _), asyncio.TaskGroup() as group:
            waits = group.create_task(front.ask(ask(OURS)))
            await metric(front, 'queue_depth{model="chat"}', 1)
            await turn(front, split(1.0), one, two)
            assert revision(await waits) == CANARY

    run(main())


@pytest.mark.interpreted  # with stand-ins
def test_requests_queued_before_the_rollout_wait_for_nobody_of_the_other_arm() -> None:
    def queued(id: str) -> Any:
        served = SimpleNamespace(split=HALF)
        return SimpleNamespace(
            served=served, side=None, revision="", retries=0, resumes=0, once=False, routing=None,
            path="/v1/chat/completions", request_id=id.encode(),
        )  # fmt: skip

    assert (kind_of(queued(OURS)), kind_of(queued(THEIRS))) == ((Arm.STABLE, False), (Arm.CANARY, False))
    named = queued(OURS)
    named.revision = CANARY
    assert kind_of(named) is None


def test_requests_queued_before_the_rollout_are_split_too(tmp_path: Path) -> None:
    async def main() -> None:
        held, one, two = Held(), stable(whole), canary(whole)
        one.answer, one.report = held, replace(one.report, capacity=1)
        async with splitting(tmp_path, split(), one) as front, asyncio.TaskGroup() as group:
            await turn(front, None, one)
            tasks = [group.create_task(front.ask(ask(f"id-{n}"))) for n in range(4)]
            await metric(front, 'queue_depth{model="chat"}', 1)
            async with working(two):
                await turn(front, split(0.0), one, two)
                polls = two.polls
                await until(lambda: two.polls > polls + 2)
                assert not two.requests
                one.answer = whole
                held.free()
                assert {revision(await task) for task in tasks} == {STABLE}

    run(main())


@pytest.mark.parametrize("bad", [cut, failing(503, "request_failed", RETRYABLE)])
def test_request_failing_on_the_canary_is_served_by_stable_and_sampled(
    tmp_path: Path, bad: Callable[[Exchange], None]
) -> None:
    async def main() -> None:
        async with splitting(tmp_path, HALF, stable(said("Yes.")), canary(bad)) as front:
            assert await answers(front, ask(THEIRS)) == [STABLE]
            (sample,) = (await observed(front)).samples
            code = "replica_lost" if bad is cut else "request_failed"
            assert (sample.arm, sample.code, sample.ttft_s) == (Arm.CANARY, code, -1.0)
            assert sample.latency_s >= 0

    run(main())


def test_a_request_rejected_by_the_canary_adds_no_sample(tmp_path: Path) -> None:
    async def main() -> None:
        async with splitting(tmp_path, HALF, stable(whole), canary(failing(503, "overloaded", RETRYABLE))) as front:
            assert await answers(front, ask(THEIRS)) == [STABLE]
            assert (await observed(front)).samples == ()

    run(main())


def test_canary_with_an_open_breaker_gets_no_requests(tmp_path: Path) -> None:
    async def main() -> None:
        bad = canary(failing(500, "internal"))
        async with splitting(tmp_path, HALF, stable(whole), bad) as front:
            some = itertools.islice(ids(Arm.CANARY, 0.5), 12)
            codes = [(await front.ask(ask(id))).status for id in some]
            assert codes == [500] * 5 + [200] * 7
            assert [sample.code for sample in (await observed(front)).samples] == ["internal_error"] * 5

    run(main())


def test_the_canary_takes_over_when_the_only_stable_replica_dies(tmp_path: Path) -> None:
    async def main() -> None:
        async with splitting(tmp_path, split(0.0), stable(cut), canary(whole)) as front:
            assert await answers(front, ask(OURS)) == [CANARY]

    run(main())


@pytest.mark.parametrize(
    ("fields", "body"),
    [
        ((b"x-forebay-session: river",), {}),
        ((), {"user": "anna"}),
        ((), {}),  # who says nothing is its address
    ],
)
def test_a_caller_stays_with_its_revision_and_only_ever_moves_to_the_new_one(
    tmp_path: Path, fields: tuple[bytes, ...], body: dict[str, str]
) -> None:
    async def main() -> None:
        workers = stable(whole), stable(whole, 1), canary(whole)
        seen: list[str] = []
        async with splitting(tmp_path, split(0.0, sticky=Sticky.CALLER), *workers) as front:
            for share in (0.05, 0.3, 0.6, 0.9, 1.0):
                await turn(front, split(share, sticky=Sticky.CALLER), *workers)
                (side,) = set(await answers(front, *(ask(f"id-{n}", *fields, **body) for n in range(4))))
                seen.append(side)
        assert seen == sorted(seen)  # r1 before r2
        assert seen[-1] == CANARY

    run(main())


def test_callers_are_spread_over_both_revisions(tmp_path: Path) -> None:
    async def main() -> None:
        async with splitting(tmp_path, split(0.5, sticky=Sticky.CALLER), stable(whole), canary(whole)) as front:
            asked = [ask(user=f"user {n}") for n in range(24)]
            assert set(await answers(front, *asked)) == {STABLE, CANARY}
            drawn = [side_of(f"key  user user {n}", ROLLOUT, 0.5) for n in range(24)]
            assert await answers(front, *asked) == [CANARY if arm is Arm.CANARY else STABLE for arm in drawn]

    run(main())


@pytest.mark.parametrize(("proxies", "sides"), [((), 1), (("127.0.0.1",), 2)])
def test_callers_behind_a_trusted_proxy_are_told_apart_by_address(
    tmp_path: Path, proxies: tuple[str, ...], sides: int
) -> None:
    async def main() -> None:
        workers = stable(whole), canary(whole)
        more: dict[str, Any] = {"trusted_proxies": proxies}
        async with splitting(tmp_path, split(0.5, sticky=Sticky.CALLER), *workers, **more) as front:
            asked = [ask(f"id-{n}", b"x-forwarded-for: 198.51.100.%d" % n) for n in range(24)]
            assert len(set(await answers(front, *asked))) == sides

    run(main())


def test_a_session_stays_at_one_replica_also_where_every_request_is_drawn(tmp_path: Path) -> None:
    async def main() -> None:
        base = replace(ROUTES, policy=Policy.CPR, sessions=Sessions.HEADER)
        workers = stable(whole), stable(whole, 1), canary(whole), canary(whole, 6)
        async with splitting(tmp_path, HALF, *workers, base=base) as front:
            homes = set()
            for session in range(12):
                line = f"x-forebay-session: s{session}".encode()
                found = [(await front.ask(ask(f"{session}-{n}", line))).headers for n in range(3)]
                (home,) = {each[b"x-forebay-replica"] for each in found}
                homes.add(home)
            assert len(homes) > 2

    run(main())


def test_sequence_stays_with_the_replica_that_holds_its_state(tmp_path: Path) -> None:
    def infer(number: int) -> bytes:
        given = {"model_name": "chat", "inputs": [], "parameters": {"sequence_id": number}}
        return post(msgspec.json.encode(given), b"/v2/models/chat/infer")

    async def main() -> None:
        base = replace(ROUTES, task=Task.TENSOR)
        one, two = stable(whole), canary(whole)
        async with splitting(tmp_path, split(1.0), one, two, base=base) as front:
            assert await answers(front, *(infer(number) for number in range(1, 9))) == [STABLE] * 8
            assert (await observed(front)).samples == ()
            one.state = ReplicaState.DRAINING
            await turn(front, split(1.0), one, two, base=base)
            assert await answers(front, infer(1)) == [CANARY]

    run(main())


def test_a_failed_request_goes_to_the_canary_rather_than_wait_for_a_full_stable(tmp_path: Path) -> None:
    async def main() -> None:
        bad = stable(cut, 1)
        async with crowded(tmp_path, HALF, STABLE) as (front, one, two, _), working(bad):
            await turn(front, HALF, one, bad, two)
            await up(front, bad)
            assert await answers(front, ask(OURS)) == [CANARY]
            await turn(front, HALF, one, two)

    run(main())


def test_preemption_stays_within_a_revision(tmp_path: Path) -> None:
    async def main() -> None:
        held, theirs = Held(), Held()
        one, two = stable(held), canary(theirs)
        for worker in (one, two):
            worker.report = replace(worker.report, capacity=1)
        async with splitting(tmp_path, HALF, one, two) as front, asyncio.TaskGroup() as group:
            asked = [group.create_task(front.ask(ask(OURS))) for _ in range(3)]
            await until(lambda: len(held.waiting) == 3)
            asked += [group.create_task(front.ask(ask(THEIRS))) for _ in range(3)]  # these are newer
            await until(lambda: len(theirs.waiting) == 3)
            asked.append(group.create_task(front.ask(ask(OURS, b"x-forebay-priority: interactive"))))
            await until(lambda: len(held.waiting) == 5)  # and one of the two preempted is queued behind it
            assert len(theirs.waiting) == 3
            one.answer = two.answer = whole
            held.free()
            theirs.free()
            assert {(await each).status for each in asked} == {200}

    run(main())


@pytest.mark.parametrize(("share", "mine"), [(0.5, THEIRS), (1.0, THEIRS)])
def test_a_failed_request_is_retried_on_the_other_revision(tmp_path: Path, share: float, mine: str) -> None:
    async def main() -> None:
        one, two = stable(cut), canary(cut)
        async with splitting(tmp_path, split(share), one, two) as front:
            assert (await front.ask(ask(mine))).status == 502
            assert (len(one.requests), len(two.requests)) == (1, 1)

    run(main())


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(3))
def test_no_request_is_lost_while_the_split_changes_under_load(tmp_path: Path, seed: int) -> None:
    async def main() -> None:
        rng = Random(seed)
        workers = stable(whole), stable(whole, 1), canary(whole), canary(whole, 6)
        async with splitting(tmp_path, split(0.0), *workers) as front:
            done = False
            statuses: list[int] = []

            async def client(name: int) -> None:
                number = 0
                while not done:
                    stream = {"stream": True} if rng.random() < 0.3 else {}
                    statuses.append((await front.ask(ask(f"{name}-{number}", **stream))).status)
                    number += 1

            async with asyncio.TaskGroup() as group:
                for name in range(6):
                    group.create_task(client(name))
                for number in range(8):
                    for worker in workers[rng.randrange(4) :]:
                        worker.state = rng.choice([ReplicaState.READY, ReplicaState.READY, ReplicaState.DRAINING])
                    workers[0].state = ReplicaState.READY
                    given = replace(
                        split(rng.choice([0.0, 0.05, 0.5, 1.0]), mirrored=rng.choice([0.0, 0.5, 1.0])),
                        rollout=f"chat:{number // 3}",
                        sticky=rng.choice(list(Sticky)),
                    )
                    await turn(front, rng.choice([given, given, None]), *workers)
                done = True
            assert set(statuses) == {200}
            assert len(statuses) > 20

    run(main())
