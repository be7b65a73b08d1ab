"""What gateways tell control of requests while a revision is rolled out."""

import asyncio
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from tests.gateway.dispatch.test_hedging import EMBED
from tests.gateway.rig import CHAT, JSON, ROUTES, USAGE, Worker, chat, cluster, failing, post, routes, working
from tests.gateway.splitting.rig import (
    ROLLOUT,
    ask,
    canary,
    ids,
    metric,
    observed,
    revision,
    said,
    sampled,
    split,
    splitting,
    stable,
    turn,
)
from tests.net.rig import peer, run, until

from forebay.core.deploy.samples import Observed, Pair, Sample
from forebay.core.model import StandIn, Task
from forebay.core.rollout.values import Arm
from forebay.gateway.rollout.reporting import PAGE_PAIRS_MAX, PAGE_SAMPLES_MAX, PAIRS_MAX, SAMPLES_MAX, Observations
from forebay.net.server import Exchange
from forebay.obs.clock import wall_s

REFUSAL = "I'm sorry, but I can't help with that."
LOOP = "and then " * 40
HALF = split(0.5)


def test_sample_of_a_successful_answer_has_latencies_tokens_and_text_flags(tmp_path: Path) -> None:
    async def main() -> None:
        async with splitting(tmp_path, HALF, stable(said("Yes, it is.")), canary(said(REFUSAL))) as front:
            before = wall_s()
            for arm in (Arm.STABLE, Arm.CANARY):
                await front.ask(ask(next(ids(arm, 0.5))))
                await front.ask(ask(next(ids(arm, 0.5)), stream=True))
            found = await sampled(front, 4)
            assert found.last == 4
            whole, streamed, *others = found.samples
            assert [each.arm for each in found.samples] == [Arm.STABLE] * 2 + [Arm.CANARY] * 2
            assert {each.code for each in found.samples} == {"ok"}
            assert {each.stratum for each in found.samples} == {"256"}
            assert all(before <= each.at <= wall_s() for each in found.samples)
            assert (whole.ttft_s, whole.tpot_s, whole.output_tokens) == (-1.0, -1.0, 3)
            assert 0 < streamed.ttft_s <= streamed.latency_s
            assert streamed.tpot_s > 0
            assert [(each.refused, each.degenerate) for each in found.samples] == [(False, False)] * 2 + [
                (True, False)
            ] * 2
            assert not any(each.early for each in others)

    run(main())


@pytest.mark.parametrize(("text", "broken"), [("", True), (LOOP, True), ("Once.", False)])
@pytest.mark.parametrize("stream", [False, True])
def test_empty_or_looping_answer_is_sampled_as_degenerate(
    tmp_path: Path, text: str, broken: bool, stream: bool
) -> None:
    async def main() -> None:
        async with splitting(tmp_path, HALF, stable(said(text)), canary(said("Fine."))) as front:
            await front.ask(ask(next(ids(Arm.STABLE, 0.5)), stream=stream))
            (sample,) = (await sampled(front, 1)).samples
            assert sample.degenerate is broken

    run(main())


def test_sample_of_a_request_begun_during_warm_up_is_marked_early(tmp_path: Path) -> None:
    async def main() -> None:
        later = split(0.5, counts_from=wall_s() + 1000)
        async with splitting(tmp_path, later, stable(said("Yes.")), canary(failing(500, "internal_error"))) as front:
            await front.ask(ask(next(ids(Arm.STABLE, 0.5))))
            await front.ask(ask(next(ids(Arm.CANARY, 0.5))))
            assert [(each.code, each.early) for each in (await observed(front)).samples] == [
                ("ok", True),
                ("internal_error", True),
            ]

    run(main())


def test_request_rejected_by_its_revision_is_sampled_as_a_rejection(tmp_path: Path) -> None:
    async def main() -> None:
        async with splitting(tmp_path, HALF, stable(said("Yes.")), canary(failing(400, "invalid_request"))) as front:
            await front.ask(ask(next(ids(Arm.CANARY, 0.5))))
            await front.ask(post(b"{", b"/v1/chat/completions"))  # the gateway's own refusal tells nothing
            assert [each.code for each in (await observed(front)).samples] == ["invalid_request"]

    run(main())


def test_rejection_by_a_revision_of_a_fallback_model_is_sampled_though_the_request_goes_on(tmp_path: Path) -> None:
    async def main() -> None:
        workers = (stable(said("Yes.")), canary(failing(400, "context_length_exceeded")))
        spare = Worker(said("Yes."), "spare-0", "spare")
        async with working(spare), splitting(tmp_path, HALF, *workers) as front:
            meant = replace(ROUTES, name="big", fallback=(StandIn("chat"), StandIn("spare")))
            models = replace(routes(*workers), split=HALF), meant, routes(spare, base=replace(ROUTES, name="spare"))
            front.write(*models)
            await until(lambda: spare.polls > 1)
            fields = b"x-request-id: " + next(ids(Arm.CANARY, 0.5)).encode()
            answer = await front.ask(post(chat("big"), CHAT, fields))
            assert answer.headers[b"x-forebay-model"] == b"spare"
            (sample,) = (await observed(front)).samples
            assert (sample.arm, sample.code) == (Arm.CANARY, "context_length_exceeded")

    run(main())


def test_cancelled_request_yields_no_failure_sample(tmp_path: Path) -> None:
    async def main() -> None:
        one = stable(lambda _: None)
        async with splitting(tmp_path, HALF, one, canary(said("Yes."))) as front:
            async with peer(front.port) as client:
                client.send(ask(next(ids(Arm.STABLE, 0.5))))
                await until(lambda: bool(one.requests))
            await metric(front, 'in_flight{model="chat"}', 0)
            assert (await observed(front)).samples == ()

    run(main())


def test_a_broken_stream_counts_against_the_revision_that_began_it(tmp_path: Path) -> None:
    def broken(exchange: Exchange) -> None:
        exchange.start(200, [(b"content-type", b"text/event-stream")])
        exchange.write(
            b'data: {"id":"c","created":1,"choices":[{"index":0,"delta":{"content":"a"},"finish_reason":null}]}\n\n'
        )
        exchange.abort()

    async def main() -> None:
        async with splitting(tmp_path, HALF, stable(said("b")), canary(broken)) as front:
            answer = await front.ask(ask(next(ids(Arm.CANARY, 0.5)), stream=True))
            assert answer.body.endswith(b"[DONE]\n\n")
            (sample,) = (await observed(front)).samples
            assert (sample.arm, sample.code) == (Arm.CANARY, "stream_interrupted")

    run(main())


def test_tokenizer_requests_yield_no_sample(tmp_path: Path) -> None:
    async def main() -> None:
        async with splitting(tmp_path, HALF, stable(said("Yes.")), canary(said("Yes."))) as front:
            id = b"x-request-id: " + next(ids(Arm.CANARY, 0.5)).encode()
            answer = await front.ask(post(b'{"model":"chat","prompt":"x"}', b"/v1/tokenize", id))
            assert revision(answer) == "r2"
            assert (await observed(front)).samples == ()

    run(main())


def test_ended_rollout_gets_no_more_samples(tmp_path: Path) -> None:
    async def main() -> None:
        waits: list[Exchange] = []
        one, two = stable(said("Yes.")), canary(waits.append)
        async with splitting(tmp_path, HALF, one, two) as front, asyncio.TaskGroup() as group:
            asked = group.create_task(front.ask(ask(next(ids(Arm.CANARY, 0.5)))))
            await until(lambda: bool(waits))
            await turn(front, None, one, two)
            said("Yes.")(waits[0])
            assert (await asked).status == 200
            assert (await observed(front)).samples == ()

    run(main())


def test_hedge_stays_within_its_revision_and_the_first_attempt_is_sampled(tmp_path: Path) -> None:
    async def main() -> None:
        def embedded(exchange: Exchange) -> None:
            exchange.respond(200, [JSON, USAGE], b'{"object":"list"}')

        first = Worker(lambda _: None, "embed-0", "embed")
        second = Worker(embedded, "embed-1", "embed")
        other = Worker(embedded, "embed-2", "embed", revision="r2")
        base = replace(EMBED, split=replace(split(0.5), rollout=ROLLOUT), task=Task.EMBED)
        async with cluster(tmp_path, first, second, other, base=base) as front:
            await until(lambda: all(worker.polls > 1 for worker in (first, second, other)))
            id = b"x-request-id: " + next(ids(Arm.STABLE, 0.5)).encode()
            for _ in range(2):  # one of them begins at the silent replica
                answer = await front.ask(post(b'{"model":"embed","input":"x"}', b"/v1/embeddings", id))
                assert revision(answer) == "r1"
            assert not other.requests
            found = (await sampled(front, 2)).samples
            assert [each.arm for each in found] == [Arm.STABLE] * 2
            # not from when the second one began
            assert max(each.latency_s for each in found) >= EMBED.hedge_after_s / 2
            assert {each.refused for each in found} == {None}

    run(main())


def some(number: int) -> Sample:
    """A sample that can be told from others."""
    return Sample(ROLLOUT, Arm.CANARY, float(number), "ok", "256")


A_PAIR = Pair(ROLLOUT, "256", "q", "a", "b")


def test_sample_ring_returns_pages_and_counts_dropped_samples() -> None:
    ring = Observations("i")
    total = SAMPLES_MAX + 10
    for number in range(1, total + 1):
        ring.note(some(number))
    found = ring.after(4, "i")
    assert (found.missed, len(found.samples), found.samples[0].at) == (6, PAGE_SAMPLES_MAX, 11.0)
    assert found.last == 10 + PAGE_SAMPLES_MAX
    assert ring.after(total, "i") == Observed("i", total)
    assert ring.after(10 * total, "i").last == total
    assert ring.after(total, "another").missed == 10


@example([True] * PAIRS_MAX, PAGE_SAMPLES_MAX)
@given(st.lists(st.booleans(), max_size=PAIRS_MAX), st.integers(1, PAGE_SAMPLES_MAX))
def test_sample_pages_return_every_sample_once(with_pair: list[bool], asks: int) -> None:
    ring = Observations("i")
    found, pairs, cursor = [], 0, 0
    for number, pair in enumerate(with_pair, 1):
        ring.note(some(number), A_PAIR if pair else None)
        while number % asks == 0 or number == len(with_pair):
            page = ring.after(cursor, "i")
            assert page.missed == 0
            assert len(page.pairs) <= PAGE_PAIRS_MAX
            assert page.last == cursor + len(page.samples)
            found += [int(each.at) for each in page.samples]
            pairs, cursor = pairs + len(page.pairs), page.last
            if not page.samples:
                break
    assert found == list(range(1, len(with_pair) + 1))
    assert pairs == sum(with_pair)


def test_observations_endpoint_returns_samples_after_the_given_number(tmp_path: Path) -> None:
    async def main() -> None:
        async with splitting(tmp_path, HALF, stable(said("Yes.")), canary(said("Yes."))) as front:
            id = next(ids(Arm.STABLE, 0.5))
            await front.ask(ask(id))
            first = await observed(front)
            await front.ask(ask(id))
            second = await observed(front, first.last, first.instance)
            assert (len(first.samples), len(second.samples), second.last) == (1, 1, 2)
            assert second.instance == first.instance
            assert len((await observed(front, 2, "another")).samples) == 2
            assert (await front.get(b"/observations")).status == 404  # nobody else's business

    run(main())
