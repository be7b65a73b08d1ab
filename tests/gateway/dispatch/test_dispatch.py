"""Requests that another model serves than the one they name: by alias, by rule, by revision, or because it must."""

import asyncio
import contextlib
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pytest
from tests.gateway.rig import (
    JSON,
    RETRYABLE,
    ROUTES,
    Front,
    Worker,
    chat,
    error_code,
    events,
    failing,
    fronting,
    post,
    routes,
    working,
)
from tests.net.rig import Answer, peer, run, until

from forebay.core.model import (
    Condition,
    Dispatch,
    ModelRoutes,
    ReplicaState,
    Rule,
    Snapshot,
    Split,
    StandIn,
    Task,
    TenancySpec,
    When,
)
from forebay.core.tenancy import ENTROPY_BYTES, Tenant, mint
from forebay.net.server import Exchange
from forebay.registry.keys import change_keys

LONG = [{"role": "user", "content": "word " * 2000}]


def naming(exchange: Exchange) -> None:
    """Answer with the model that the body names, as a worker does."""
    model = msgspec.json.decode(exchange.body)["model"]
    exchange.respond(200, [JSON, (b"x-forebay-usage", b"7,3,2")], msgspec.json.encode({"model": model}))


def worker(model: str, answer: Any = naming, index: int = 0) -> Worker:
    return Worker(answer, f"{model}-{index}", model)


def model(*workers: Worker, **more: Any) -> ModelRoutes:
    return routes(*workers, base=replace(ROUTES, name=workers[0].model, **more))


def publish(folder: Path, dispatch: Dispatch, *models: ModelRoutes) -> None:
    """Write a snapshot with names."""
    path = folder / "snapshot.json"
    draft = path.with_suffix(".draft")
    draft.write_bytes(msgspec.json.encode(Snapshot(1, models, dispatch)))
    draft.replace(path)


@contextlib.asynccontextmanager
async def serving(
    folder: Path, *models: tuple[Worker, dict[str, Any]], dispatch: Dispatch | None = None, **more: Any
) -> AsyncIterator[Front]:
    """A gateway before models of one worker each, once it has heard of those that are ready."""
    workers = [each for each, _ in models]
    async with working(*workers):
        publish(folder, dispatch or Dispatch(), *(model(each, **settings) for each, settings in models))
        async with fronting(folder, **more) as front:
            await until(lambda: all(each.polls > 1 for each in workers))
            yield front


async def ask(front: Front, name: str, *fields: bytes, **more: Any) -> Answer:
    return await front.ask(post(chat(name, **more), b"/v1/chat/completions", *fields))


def served_by(answer: Answer) -> tuple[str, str]:
    """The model that served it, and why that one."""
    assert answer.status == 200, answer.body
    named = msgspec.json.decode(answer.body)["model"]
    assert answer.headers[b"x-forebay-model"] == named.encode()
    return named, answer.headers.get(b"x-forebay-dispatch", b"").decode()


RULES = (
    Rule("auto", "big", when=When(prompt_tokens_min=1000)),
    Rule("auto", "big", when=When(header="x-tier", header_prefix="go")),
    Rule("auto", "small"),
)


def test_response_and_log_name_the_model_chosen_by_alias_or_rule(tmp_path: Path) -> None:
    async def main() -> None:
        dispatch = Dispatch({"gpt-4.1": "big", "any": "auto"}, RULES)
        async with serving(tmp_path, (worker("big"), {}), (worker("small"), {}), dispatch=dispatch) as front:
            assert served_by(await ask(front, "big")) == ("big", "")
            assert served_by(await ask(front, "gpt-4.1")) == ("big", "gpt-4.1 is an alias of it")
            assert served_by(await ask(front, "auto")) == ("small", "routes[2]")
            assert served_by(await ask(front, "any", messages=LONG)) == ("big", "routes[0]")
            assert served_by(await ask(front, "auto", b"X-Tier: gold")) == ("big", "routes[1]")
            answer = await ask(front, "auto", b"x-forebay-budget-ms: soon")
            assert (answer.status, error_code(answer)) == (400, "invalid_request")
            answer = await ask(front, "other")
            assert (answer.status, error_code(answer)) == (404, "model_not_found")
            await until(lambda: len(front.lines()) >= 7)
            named = [(line["model"], line.get("asked")) for line in front.lines()[:4]]
            assert [line.get("asked") for line in front.lines()[4:5]] == ["auto"]
            assert named == [("big", None), ("big", "gpt-4.1"), ("small", "auto"), ("big", "any")]

    run(main())


def test_a_name_that_has_no_model_for_the_task_is_refused(tmp_path: Path) -> None:
    async def main() -> None:
        dispatch = Dispatch({"vectors": "embed"}, (Rule("auto", "embed"),))
        async with serving(tmp_path, (worker("embed"), {"task": Task.EMBED}), dispatch=dispatch) as front:
            for name in ("auto", "vectors"):
                answer = await ask(front, name)
                assert (answer.status, error_code(answer)) == (400, "wrong_task")

    run(main())


def test_names_change_with_the_snapshot_and_are_listed(tmp_path: Path) -> None:
    async def main() -> None:
        big, small = worker("big"), worker("small")
        async with serving(tmp_path, (big, {}), (small, {})) as front:
            assert (await ask(front, "best")).status == 404
            dispatch = Dispatch({"best": "big", "org/best": "big"}, RULES)
            publish(tmp_path, dispatch, model(big), model(small))
            async with asyncio.timeout(10):
                while (await front.get(b"/v1/models/org%2Fbest")).status != 200:
                    await asyncio.sleep(0.005)
            assert served_by(await ask(front, "best"))[0] == "big"
            listed = msgspec.json.decode((await front.get(b"/v1/models")).body)["data"]
            assert {each["id"]: each.get("parent") for each in listed} == {
                "big": None, "small": None, "auto": None, "best": "big", "org/best": "big",
            }  # fmt: skip
            assert {each["owned_by"] for each in listed} == {"forebay"}

    run(main())


def test_tenant_permissions_apply_to_aliased_models(tmp_path: Path) -> None:
    key, record = mint("team", bytes(ENTROPY_BYTES), now=0.0)
    change_keys(tmp_path / "keys.json", lambda _: ((record,), None))
    team = Tenant("team", ("big", "small"))
    paths = (str(tmp_path / "keys.json"), str(tmp_path / "counts.json"), str(tmp_path / "leases.json"))
    rules = (Rule("auto", "tiny", when=When(header="x-tiny")), Rule("auto", "small", when=When(tenant="team")))
    dispatch = Dispatch({"best": "big", "least": "tiny"}, (*rules, Rule("auto", "big")))
    bearer = b"authorization: Bearer " + key.encode()

    async def main() -> None:
        big, small, tiny = worker("big"), worker("small"), worker("tiny")
        models = (big, {"fallback": (StandIn("tiny"), StandIn("small"))}), (small, {}), (tiny, {})
        async with serving(tmp_path, *models, dispatch=dispatch, tenancy=TenancySpec((team,), *paths)) as front:
            for name in ("best", "auto", "auto@r1", "nobody"):
                assert (await ask(front, name)).status == 401
            assert served_by(await ask(front, "best", bearer))[0] == "big"
            assert served_by(await ask(front, "auto", bearer)) == ("small", "routes[1]")
            for name, fields in (("least", ()), ("auto", (b"x-tiny: 1",)), ("tiny@r1", ())):
                answer = await ask(front, name, bearer, *fields)
                assert (answer.status, error_code(answer)) == (403, "model_not_allowed")
            listing = b"GET /v1/models HTTP/1.1\r\nhost: a\r\n%b\r\n\r\n" % bearer
            listed = msgspec.json.decode((await front.ask(listing)).body)["data"]
            assert [each["id"] for each in listed] == ["big", "small", "auto", "best"]
            big.report = replace(big.report, state=ReplicaState.DRAINING)
            polls = big.polls
            await until(lambda: big.polls > polls + 1)
            assert served_by(await ask(front, "best", bearer)) == ("small", "big is down")
            assert tiny.requests == []

    run(main())


# --- revisions


def test_a_revision_in_the_name_is_served_by_its_replicas_only(tmp_path: Path) -> None:
    async def main() -> None:
        old, new = worker("chat"), worker("chat", index=1)
        async with working(old, new):
            both = model(old, new)
            rows = (both.replicas[0], replace(both.replicas[1], revision="r2"))
            publish(tmp_path, Dispatch({"best": "chat"}), replace(both, replicas=rows))
            async with fronting(tmp_path) as front:
                await until(lambda: old.polls > 1 and new.polls > 1)
                for name in ("chat@r2", "best@r2"):
                    for _ in range(4):
                        answer = await ask(front, name)
                        assert served_by(answer) == ("chat", "the revision asked for")
                        assert answer.headers[b"x-forebay-replica"] == b"chat-1"
                assert old.requests == []
                answer = await ask(front, "chat@r3")
                assert (answer.status, error_code(answer)) == (404, "model_not_found")
                assert b"there are: r1, r2" in answer.body
                assert (await ask(front, "nobody@r1")).status == 404

    run(main())


def test_a_request_waiting_for_a_revision_does_not_block_others(tmp_path: Path) -> None:
    held: list[Exchange] = []

    async def main() -> None:
        old, new = worker("chat"), worker("chat", held.append, index=1)
        new.report = replace(new.report, capacity=1)
        async with working(old, new):
            both = model(old, new)
            rows = (both.replicas[0], replace(both.replicas[1], revision="r2"))
            publish(tmp_path, Dispatch(), replace(both, replicas=rows))
            async with fronting(tmp_path) as front, asyncio.TaskGroup() as group:
                await until(lambda: old.polls > 1 and new.polls > 1)
                pinned = [group.create_task(ask(front, "chat@r2")) for _ in range(4)]
                await until(lambda: len(held) == 3)  # that is its room
                assert (await ask(front, "chat")).headers[b"x-forebay-replica"] == b"chat-0"
                new.answer = naming
                for exchange in held:
                    naming(exchange)
                for answer in pinned:
                    assert (await answer).headers[b"x-forebay-replica"] == b"chat-1"

    run(main())


@pytest.mark.parametrize("others", [False, True], ids=["alone", "beside another revision"])
def test_request_waits_for_a_revision_whose_replicas_are_temporarily_gone(tmp_path: Path, others: bool) -> None:
    async def main() -> None:
        old, new = worker("chat"), worker("chat", index=1)
        async with working(old, new):
            rows = (replace(old.row(), revision="r2"), replace(new.row(), revision="r1"))
            split = Split("1", "r2", "r1", 0.5) if others else None
            whole = replace(model(old, new), replicas=rows[: 1 + others], revision="r2", split=split)
            without = replace(whole, replicas=rows[1:] if others else ())
            publish(tmp_path, Dispatch(), without)
            async with fronting(tmp_path) as front, asyncio.TaskGroup() as group:
                await until(lambda: new.polls > 1 or not others)
                waits = group.create_task(ask(front, "chat@r2"))
                while await front.metric('forebay_queue_depth{model="chat"}') < 1:
                    assert not waits.done()
                answer = await ask(front, "chat@r3")
                assert (answer.status, error_code(answer)) == (404, "model_not_found")
                publish(tmp_path, Dispatch(), whole)
                assert (await waits).headers[b"x-forebay-replica"] == b"chat-0"

    run(main())


# --- stepping in

STEPS_IN = {"fallback": (StandIn("small"),)}


def test_unavailable_model_falls_back_at_once(tmp_path: Path) -> None:
    async def main() -> None:
        big, small = worker("big"), worker("small")
        big.report = replace(big.report, state=ReplicaState.DRAINING)
        async with serving(tmp_path, (big, STEPS_IN), (small, {})) as front:
            assert served_by(await ask(front, "big")) == ("small", "big is down")
            assert small.bodies == [chat("small")]
            await until(lambda: bool(front.lines()))
            line = front.lines()[0]
            assert (line["model"], line["asked"], line["replica"]) == ("small", "big", "small-0")
            assert await front.metric('forebay_fallbacks_total{model="big",trouble="down"}') == 1

    run(main())


def test_without_a_usable_fallback_a_request_waits_for_its_model(tmp_path: Path) -> None:
    async def main() -> None:
        big, small = worker("big"), worker("small")
        for each in (big, small):
            each.report = replace(each.report, state=ReplicaState.DRAINING)
        settings = {**STEPS_IN, "queue_timeout_s": 0.1}
        async with serving(tmp_path, (big, settings), (small, {}), dispatch=Dispatch({"best": "big"})) as front:
            for name in ("big", "best"):
                answer = await ask(front, name)
                assert (answer.status, error_code(answer)) == (503, "no_replica")

    run(main())


def test_fallback_serves_streams(tmp_path: Path) -> None:
    async def main() -> None:
        big, small = worker("big"), worker("small", events)
        big.report = replace(big.report, state=ReplicaState.DRAINING)
        async with serving(tmp_path, (big, STEPS_IN), (small, {})) as front:
            answer = await ask(front, "big", stream=True)
            assert answer.body.endswith(b"[DONE]\n\n")
            assert answer.headers[b"x-forebay-model"] == b"small"
            assert answer.headers[b"x-forebay-dispatch"] == b"big is down"

    run(main())


@pytest.mark.parametrize(
    ("default", "field", "model"),
    [
        (True, b"x-forebay-fallback: deny", None),
        (True, b"x-other: 1", "small"),
        (False, b"x-other: 1", None),
        (False, b"x-forebay-fallback: allow", "small"),
    ],
)
def test_no_fallback_unless_the_caller_agrees(tmp_path: Path, default: bool, field: bytes, model: str | None) -> None:
    async def main() -> None:
        big, small = worker("big"), worker("small")
        big.report = replace(big.report, state=ReplicaState.DRAINING)
        settings = {**STEPS_IN, "fallback_default": default, "queue_timeout_s": 0.05}
        async with serving(tmp_path, (big, settings), (small, {})) as front:
            answer = await ask(front, "big", field)
            if model:
                assert served_by(answer)[0] == model
            else:
                assert (answer.status, error_code(answer)) == (503, "no_replica")
                assert small.requests == []

    run(main())


@pytest.mark.parametrize(
    ("path", "more"),
    [
        ("/v1/tokenize", {"prompt": "a"}),
        ("/v1/detokenize", {"tokens": [5, 6]}),
        ("/v1/messages/count_tokens", {"messages": [{"role": "user", "content": "a"}]}),
        ("/v1/completions", {"prompt": [5, 6]}),
        ("/v1/completions", {"prompt": [[5], [6]]}),
        ("/v1/completions", {"prompt": ["5", "6"]}),
    ],
)
def test_no_fallback_for_requests_about_the_tokens_of_a_model(
    tmp_path: Path, path: str, more: dict[str, object]
) -> None:
    async def main() -> None:
        big, small = worker("big"), worker("small")
        big.report = replace(big.report, state=ReplicaState.DRAINING)
        async with serving(tmp_path, (big, {**STEPS_IN, "queue_timeout_s": 0.05}), (small, {})) as front:
            body = msgspec.json.encode({"model": "big", "max_tokens": 4, **more})
            answer = await front.ask(post(body, path.encode()))
            text = more.get("prompt") == ["5", "6"]
            assert (answer.status, bool(small.requests)) == ((200, True) if text else (503, False))

    run(main())


def test_invalid_fallback_header_is_rejected_for_models_with_fallbacks(tmp_path: Path) -> None:
    async def main() -> None:
        async with serving(tmp_path, (worker("big"), STEPS_IN), (worker("small"), {})) as front:
            answer = await ask(front, "big", b"x-forebay-fallback: maybe")
            assert (answer.status, error_code(answer)) == (400, "invalid_request")
            assert b"'x-forebay-fallback': allowed are allow, deny." in answer.body
            assert served_by(await ask(front, "small", b"x-forebay-fallback: maybe"))[0] == "small"

    run(main())


@pytest.mark.parametrize("settings", [{"queue_max": 0}, {"queue_timeout_s": 0.05}], ids=["full", "too slow"])
def test_saturated_model_falls_back_instead_of_rejecting(tmp_path: Path, settings: dict[str, Any]) -> None:
    held: list[Exchange] = []

    async def main() -> None:
        big, small, tiny = worker("big", held.append), worker("small"), worker("tiny")
        big.report = replace(big.report, capacity=1)
        chain = (StandIn("tiny", (Condition.DOWN,)), StandIn("small", (Condition.SATURATED,)))
        async with (
            serving(tmp_path, (big, {"fallback": chain, **settings}), (small, {}), (tiny, {})) as front,
            asyncio.TaskGroup() as group,
        ):
            first = [group.create_task(ask(front, "big")) for _ in range(3)]
            await until(lambda: len(held) == 3)
            assert served_by(await ask(front, "big")) == ("small", "big is saturated")
            answer = await ask(front, "big", b"x-forebay-fallback: deny")
            assert error_code(answer) in ("queue_full", "queue_timeout")
            for exchange in held:
                naming(exchange)
            assert {served_by(await each)[0] for each in first} == {"big"}

    run(main())


def test_repeatedly_failing_replica_leads_to_a_fallback(tmp_path: Path) -> None:
    async def main() -> None:
        big, small = worker("big", failing(503, "request_failed", RETRYABLE)), worker("small")
        async with serving(tmp_path, (big, STEPS_IN), (small, {})) as front:
            assert served_by(await ask(front, "big")) == ("small", "big is down")
            assert len(big.requests) == 1

    run(main())


def test_fallback_chain_continues_when_a_fallback_fails_and_is_finite(tmp_path: Path) -> None:
    async def main() -> None:
        broken = failing(503, "request_failed", RETRYABLE)
        big, small, tiny = worker("big", broken), worker("small", broken), worker("tiny")
        chain = {"fallback": (StandIn("small"), StandIn("tiny"), StandIn("big"))}
        back = {"fallback": (StandIn("big"),)}
        async with serving(tmp_path, (big, chain), (small, back), (tiny, back)) as front:
            assert served_by(await ask(front, "big")) == ("tiny", "big is down")
            tiny.answer = broken
            answer = await ask(front, "big")
            assert (answer.status, error_code(answer)) == (503, "request_failed")
            assert [len(each.requests) for each in (big, small, tiny)] == [2, 2, 2]

    run(main())


def test_queued_requests_fall_back_when_the_last_replica_goes(tmp_path: Path) -> None:
    held: list[Exchange] = []

    async def main() -> None:
        big, small = worker("big", held.append), worker("small")
        big.report = replace(big.report, capacity=1)
        async with (
            serving(tmp_path, (big, STEPS_IN), (small, {})) as front,
            peer(front.port) as waiting,
            peer(front.port) as patient,
            asyncio.TaskGroup() as group,
        ):
            first = [group.create_task(ask(front, "big")) for _ in range(3)]
            await until(lambda: len(held) == 3)
            waiting.send(post(chat("big")))
            patient.send(post(chat("big"), b"/v1/chat/completions", b"x-forebay-fallback: deny"))
            await _queued(front, 2)
            big.report = replace(big.report, state=ReplicaState.DRAINING)
            assert served_by(await waiting.answer()) == ("small", "big is down")
            big.answer = naming
            big.report = replace(big.report, state=ReplicaState.READY)
            for exchange in held:
                naming(exchange)
            assert served_by(await patient.answer()) == ("big", "")
            for each in first:
                assert served_by(await each) == ("big", "")

    run(main())


async def _queued(front: Front, depth: int) -> None:
    async with asyncio.timeout(10):
        while await front.metric('forebay_queue_depth{model="big"}') != depth:
            await asyncio.sleep(0.002)


def test_a_request_falls_back_to_a_free_model_after_half_of_its_time(tmp_path: Path) -> None:
    held: list[Exchange] = []

    async def main() -> None:
        big, small = worker("big", held.append), worker("small")
        big.report = replace(big.report, capacity=1)
        async with serving(tmp_path, (big, STEPS_IN), (small, {})) as front, asyncio.TaskGroup() as group:
            first = [group.create_task(ask(front, "big")) for _ in range(3)]
            await until(lambda: len(held) == 3)
            named = await ask(front, "big", b"x-forebay-deadline-ms: 2000")
            assert served_by(named) == ("small", "big is saturated")
            assert 900 <= int(named.headers[b"x-forebay-queue-ms"]) < 2000
            alone = await ask(front, "big", b"x-forebay-deadline-ms: 200", b"x-forebay-fallback: deny")
            assert error_code(alone) == "deadline_exceeded"
            for exchange in held:
                naming(exchange)
            for each in first:
                assert served_by(await each)[0] == "big"

    run(main())


def test_no_fallback_for_a_named_revision_or_after_the_deadline(tmp_path: Path) -> None:
    held: list[Exchange] = []

    async def main() -> None:
        big, small = worker("big", held.append), worker("small")
        big.report = replace(big.report, capacity=1)
        async with (
            serving(tmp_path, (big, {**STEPS_IN, "queue_timeout_s": 0.2}), (small, {})) as front,
            asyncio.TaskGroup() as group,
        ):
            first = [group.create_task(ask(front, "big")) for _ in range(3)]
            await until(lambda: len(held) == 3)
            answer = await ask(front, "big@r1")
            assert (answer.status, error_code(answer)) == (503, "queue_timeout")
            answer = await ask(front, "big", b"x-forebay-deadline-ms: 0")
            assert error_code(answer) == "deadline_exceeded"
            for exchange in held:
                naming(exchange)
            for each in first:
                assert served_by(await each)[0] == "big"
            assert small.requests == []

    run(main())
