"""Copies of requests for a canary: nobody notices them, and both answers are compared."""

import asyncio
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pytest
from tests.gateway.rig import EVENT_STREAM, RETRYABLE, ROUTES, Front, failing, post, whole
from tests.gateway.splitting.rig import (
    CANARY,
    STABLE,
    ask,
    canary,
    metric,
    mirrored_ids,
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

from forebay.core.deploy.samples import PAIR_CHARS_MAX
from forebay.core.model import ReplicaState, Task
from forebay.core.rollout.values import Arm
from forebay.gateway.rollout import mirroring
from forebay.net.server import Exchange, Handler
from forebay.obs.clock import wall_s

SHADOW = split(0.0, mirrored=1.0)
SCHEMA = {"type": "json_schema", "json_schema": {"name": "n", "schema": {"type": "object"}}}


async def mirrored(front: Front, outcome: str, times: int = 1) -> None:
    """Wait until so many copies have come to this end."""
    await metric(front, f'mirrored_requests_total{{model="chat",outcome="{outcome}"}}', times)


@pytest.mark.parametrize("stream", [False, True])
def test_mirrored_request_yields_a_pair_of_answers(tmp_path: Path, stream: bool) -> None:
    async def main() -> None:
        one, two = stable(said("Yes.")), canary(said("No, never."))
        async with splitting(tmp_path, SHADOW, one, two) as front:
            answer = await front.ask(ask("id-1", stream=stream))
            assert revision(answer) == STABLE
            assert b"never" not in answer.body
            found = await sampled(front, 2, pairs=1)
            (pair,) = found.pairs
            assert (pair.prompt, pair.stable.strip(), pair.canary.strip(), pair.schema) == (
                "secret prompt", "Yes.", "No, never.", "",
            )  # fmt: skip
            assert two.bodies == one.bodies
            by_arm = {each.arm: each for each in found.samples}
            copy = by_arm[Arm.CANARY]
            assert (copy.code, copy.ttft_s, copy.tpot_s, copy.latency_s) == ("ok", -1.0, -1.0, -1.0)
            assert (copy.output_tokens, copy.degenerate) == (2, False)
            assert by_arm[Arm.STABLE].latency_s >= 0

    run(main())


def test_mirrored_copies_are_a_share_of_requests_and_are_not_accounted(tmp_path: Path) -> None:
    async def main() -> None:
        two = canary(said("No."))
        async with splitting(tmp_path, split(0.0, mirrored=0.5), stable(said("Yes.")), two) as front:
            await front.ask(ask(next(mirrored_ids(0.5, False))))
            assert not two.requests
            await front.ask(ask(next(mirrored_ids(0.5, True))))
            await mirrored(front, "ok")
            assert len(two.requests) == 1
            assert await front.metric('forebay_requests_total{code="ok",model="chat"}') == 2
            assert await front.metric('forebay_completion_tokens_total{model="chat"}') == 2
            await until(lambda: len(front.lines()) == 2)

    run(main())


@pytest.mark.parametrize(
    "request_bytes",
    [
        ask("id-1", model=f"chat@{STABLE}"),
        ask("id-1", model=f"chat@{CANARY}"),
        post(b'{"model":"chat","prompt":"x"}', b"/v1/tokenize"),
        post(b'{"model":"chat","input":"x"}', b"/v1/responses"),
    ],
)
def test_only_side_effect_free_requests_without_a_named_revision_are_mirrored(
    tmp_path: Path, request_bytes: bytes
) -> None:
    async def main() -> None:
        one, two = stable(whole), canary(whole)
        async with splitting(tmp_path, SHADOW, one, two) as front:
            assert (await front.ask(request_bytes)).status == 200
            await front.ask(ask("id-2"))
            await mirrored(front, "ok")
            assert len(one.requests) + len(two.requests) == 3  # of two requests one was copied

    run(main())


@pytest.mark.parametrize(
    ("bad", "code"),
    [
        (failing(500, "internal_error"), "internal_error"),
        (failing(400, "invalid_request"), "invalid_request"),
        (failing(503, "request_failed", RETRYABLE), "request_failed"),
        (failing(503, "engine_failed", RETRYABLE), "engine_failed"),
        (lambda exchange: exchange.abort(), "replica_lost"),
        (lambda exchange: exchange.respond(200, [], b'{"cut'), "replica_lost"),
    ],
)
def test_a_failed_mirrored_copy_counts_against_the_canary_only(tmp_path: Path, bad: Handler, code: str) -> None:
    async def main() -> None:
        async with splitting(tmp_path, SHADOW, stable(said("Yes.")), canary(bad)) as front:
            assert (await front.ask(ask("id-1"))).status == 200
            await mirrored(front, "failed")
            found = await sampled(front, 2)
            assert {(each.arm, each.code) for each in found.samples} == {(Arm.STABLE, "ok"), (Arm.CANARY, code)}
            assert found.pairs == ()

    run(main())


@pytest.mark.parametrize(
    ("ending", "code"),
    [
        ((b"x-forebay-error", b"engine_failed"), "engine_failed"),
        ((b"x-forebay-error", b"of a later version"), "stream_interrupted"),
        ((b"x-other", b"1"), "stream_interrupted"),
    ],
)
def test_mirrored_stream_without_a_complete_end_counts_as_failed(
    tmp_path: Path, ending: tuple[bytes, bytes], code: str
) -> None:
    def broken(exchange: Exchange) -> None:
        exchange.start(200, [EVENT_STREAM])
        exchange.write(b'data: {"n":1}\n\n')
        exchange.end([ending])

    async def main() -> None:
        async with splitting(tmp_path, SHADOW, stable(said("Yes.")), canary(broken)) as front:
            assert (await front.ask(ask("id-1", stream=True))).status == 200
            await mirrored(front, "failed")
            found = await sampled(front, 2)
            assert [each.code for each in found.samples if each.arm is Arm.CANARY] == [code]

    run(main())


def test_rejected_mirrored_copy_is_not_a_canary_failure(tmp_path: Path) -> None:
    async def main() -> None:
        two = canary(failing(503, "overloaded", RETRYABLE))
        async with splitting(tmp_path, SHADOW, stable(said("Yes.")), two) as front:
            await front.ask(ask("id-1"))
            await mirrored(front, "no_room")
            assert [each.arm for each in (await observed(front)).samples] == [Arm.STABLE]

    run(main())


def test_mirrored_copies_are_limited_and_yield_to_canary_requests(tmp_path: Path) -> None:
    async def main() -> None:
        kept: list[Exchange] = []
        two = canary(kept.append)
        two.report = replace(two.report, capacity=2)
        async with splitting(tmp_path, SHADOW, stable(whole), two) as front, asyncio.TaskGroup() as group:
            for number in range(3):
                assert (await front.ask(ask(f"id-{number}"))).status == 200
            await mirrored(front, "no_room")
            await until(lambda: len(kept) == 2)
            gone: list[Exchange] = []
            for exchange in kept:
                exchange.on_disconnect = lambda each=exchange: gone.append(each)
            pinned = [group.create_task(front.ask(ask(model=f"chat@{CANARY}"))) for _ in range(2)]
            await mirrored(front, "gave_way", 2)
            await until(lambda: len(kept) == 4)
            await until(lambda: len(gone) == 2)
            for exchange in kept[2:]:
                whole(exchange)
            assert [(await each).status for each in pinned] == [200, 200]

    run(main())


def test_mirrored_copies_in_load_reports_do_not_reduce_the_canarys_room(tmp_path: Path) -> None:
    async def main() -> None:
        kept: list[Exchange] = []
        two = canary(kept.append)
        two.report = replace(two.report, capacity=1, in_flight=1)
        async with splitting(tmp_path, SHADOW, stable(whole), two) as front, asyncio.TaskGroup() as group:
            two.report = replace(two.report, in_flight=0)
            polls = two.polls
            await until(lambda: two.polls > polls + 1)
            await front.ask(ask("id-1"))
            await until(lambda: len(kept) == 1)
            two.report = replace(two.report, in_flight=1)
            polls = two.polls
            await until(lambda: two.polls > polls + 1)
            pinned = [group.create_task(front.ask(ask(model=f"chat@{CANARY}"))) for _ in range(3)]
            await until(lambda: len(kept) == 4)  # one place and two seats
            for exchange in kept[1:]:
                whole(exchange)
            assert {(await each).status for each in pinned} == {200}

    run(main())


def test_mirrored_copy_times_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mirroring, "MIRROR_S_MAX", 0.02)

    async def main() -> None:
        async with splitting(tmp_path, SHADOW, stable(said("Yes.")), canary(lambda _: None)) as front:
            await front.ask(ask("id-1"))
            await mirrored(front, "late")
            assert [each.arm for each in (await observed(front)).samples] == [Arm.STABLE]

    run(main())


def test_client_disconnect_does_not_cancel_the_mirrored_copy(tmp_path: Path) -> None:
    async def main() -> None:
        kept: list[Exchange] = []
        one = stable(lambda _: None)
        async with splitting(tmp_path, SHADOW, one, canary(kept.append)) as front:
            async with peer(front.port) as client:
                client.send(ask("id-1"))
                await until(lambda: bool(one.requests and kept))
            await metric(front, 'in_flight{model="chat"}', 0)
            said("No.")(kept[0])
            await mirrored(front, "ok")
            found = await observed(front)
            assert [each.arm for each in found.samples] == [Arm.CANARY]
            assert found.pairs == ()

    run(main())


def test_removed_replica_is_not_blamed_for_its_mirrored_copies(tmp_path: Path) -> None:
    async def main() -> None:
        kept: list[Exchange] = []
        one, two = stable(said("Yes.")), canary(kept.append)
        async with splitting(tmp_path, SHADOW, one, two) as front:
            await front.ask(ask("id-1"))
            await until(lambda: bool(kept))
            await turn(front, SHADOW, one)
            await mirrored(front, "gave_way")
            assert [each.arm for each in (await observed(front)).samples] == [Arm.STABLE]

    run(main())


def test_canary_not_in_service_gets_no_mirrored_copies(tmp_path: Path) -> None:
    async def main() -> None:
        one, two = stable(said("Yes.")), canary(whole)
        async with splitting(tmp_path, SHADOW, one, two) as front:
            two.state = ReplicaState.DRAINING
            await turn(front, SHADOW, one, two)
            await front.ask(ask("id-1"))
            await mirrored(front, "no_room")
            assert not two.requests

    run(main())


@pytest.mark.parametrize(
    ("format", "text", "schema"),
    [
        ({"type": "json_object"}, "{}", "{}"),
        (SCHEMA, "{}", '{"type":"object"}'),
        ({"type": "text"}, "x", ""),
        (SCHEMA, "x" * (PAIR_CHARS_MAX + 1), ""),  # it was cut, so it fits no schema
    ],
)
def test_pair_includes_the_requested_response_schema(
    tmp_path: Path, format: dict[str, Any], text: str, schema: str
) -> None:
    async def main() -> None:
        async with splitting(tmp_path, SHADOW, stable(said("{}")), canary(said(text))) as front:
            await front.ask(ask("id-1", response_format=format))
            (pair,) = (await sampled(front, 2, pairs=1)).pairs
            assert pair.schema == schema
            assert len(pair.canary) <= PAIR_CHARS_MAX

    run(main())


def vectors(*found: list[float], extra: str = "") -> Handler:
    """Answer with these embeddings."""
    data = [{"embedding": each} for each in found]
    body = msgspec.json.encode({"object": "list", "extra": extra, "data": data})
    return lambda exchange: exchange.respond(200, [(b"content-type", b"application/json")], body)


@pytest.mark.parametrize(
    ("answers", "alike"),
    [
        ((vectors([1.0, 0.0]), vectors([2.0, 0.0])), 1.0),
        ((vectors([1.0, 0.0], [0.0, 1.0]), vectors([1.0, 0.0], [0.0, -1.0])), 0.5),
        ((vectors([1.0, 0.0]), vectors([1.0])), 0.0),
        ((vectors([1.0, 0.0]), vectors()), 0.0),
        ((vectors([1.0, 0.0]), said("What is a vector?")), 0.0),
        ((vectors(), vectors([1.0])), None),
        ((vectors([1.0]), vectors([1.0], extra="x" * mirroring.VECTORS_BYTES_MAX)), None),
        ((vectors([1.0], extra="x" * mirroring.VECTORS_BYTES_MAX), vectors([1.0])), None),
    ],
)
def test_pair_of_embeddings_holds_their_similarity(
    tmp_path: Path, answers: tuple[Handler, Handler], alike: float | None
) -> None:
    async def main() -> None:
        base = replace(ROUTES, task=Task.EMBED)
        async with splitting(tmp_path, SHADOW, stable(answers[0]), canary(answers[1]), base=base) as front:
            await front.ask(post(msgspec.json.encode({"model": "chat", "input": "x"}), b"/v1/embeddings"))
            await mirrored(front, "ok")
            found = await sampled(front, 2)
            assert [each.alike for each in found.pairs] == ([] if alike is None else [alike])
            assert {(each.stable, each.canary, each.prompt) for each in found.pairs} <= {("", "", "")}
            assert {each.refused for each in found.samples} == {None}

    run(main())


def test_mirrored_copies_during_warm_up_yield_no_pair(tmp_path: Path) -> None:
    async def main() -> None:
        warming = replace(SHADOW, counts_from=wall_s() + 1000.0)
        async with splitting(tmp_path, warming, stable(said("Yes.")), canary(said("No."))) as front:
            await front.ask(ask("id-1"))
            await mirrored(front, "ok")
            found = await sampled(front, 2)
            assert [each.early for each in found.samples] == [True, True]
            assert found.pairs == ()

    run(main())


def test_mirrored_answer_too_large_to_compare_counts_as_successful(tmp_path: Path) -> None:
    async def main() -> None:
        large = "x" * (mirroring.ANSWER_BYTES_MAX + 1)
        async with splitting(tmp_path, SHADOW, stable(said("Yes.")), canary(said(large))) as front:
            await front.ask(ask("id-1"))
            await mirrored(front, "ok")
            found = await sampled(front, 2)
            assert [each.degenerate for each in found.samples if each.arm is Arm.CANARY] == [None]

    run(main())
