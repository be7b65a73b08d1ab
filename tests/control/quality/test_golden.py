"""Golden sets over real sockets: how failures, rejections and responses are scored."""

import asyncio
import json
from collections.abc import Mapping
from contextlib import AsyncExitStack
from pathlib import Path
from random import Random

import pytest
from tests.control.quality.fake import Body, Replying, chatting, embedding, refusing, replica

from forebay.control.quality.client import ANSWER_BYTES_MAX, HttpModelClient, Lost, ReplicaTarget
from forebay.control.quality.golden import Party, ask_both, golden_per_s, golden_problems, golden_round, read_golden
from forebay.core.deploy.scoring import Case, Scorer, golden_of
from forebay.core.deploy.settings import ROUND_CASES_MAX, GoldenSettings, RolloutSettings
from forebay.core.errors import Code
from forebay.core.rollout import Observation

CAPITALS = {"France": "Paris", "Japan": "Tokyo", "Italy": "Rome"}
FINE, BAD = chatting(lambda text: CAPITALS[text]), chatting(lambda text: "I do not know.")
NOWHERE = "http://127.0.0.1:1"


def case(scorer: str = "exact", request: dict[str, object] | None = None, **beside: object) -> Case:
    said = {"messages": [{"role": "user", "content": "France"}], **(request or {})}
    entry = {"id": "a", "request": said, "scorer": scorer, **(beside or {"expected": "Paris"})}
    golden = golden_of(json.dumps(entry).encode())
    assert not golden.problems
    return golden.cases[0]


async def ask_case(
    stable: Replying | str, canary: Replying | str, one: Case, helpers: Mapping[str, Replying] | None = None
) -> list[Observation]:
    """What a case finds out; for a text nobody listens there."""
    async with AsyncExitStack() as stack:
        urls = [
            each if isinstance(each, str) else await stack.enter_async_context(replica(each))
            for each in (stable, canary)
        ]
        others = {
            name: ReplicaTarget(await stack.enter_async_context(replica(each)), name)
            for name, each in (helpers or {}).items()
        }
        asker = HttpModelClient()
        stack.push_async_callback(asker.close)
        return await ask_both(asker, Party(*(ReplicaTarget(url, "m") for url in urls), **others), one, 5.0)


def values(found: list[Observation], metric: str) -> dict[str, float]:
    assert all(each.stratum == "golden" for each in found)
    return {each.arm.value: each.value for each in found if each.metric == metric}


@pytest.mark.parametrize(
    ("stable", "canary", "better"), [(FINE, FINE, 0.0), (FINE, BAD, -1.0), (BAD, FINE, 1.0), (BAD, BAD, 0.0)]
)
def test_quality_compares_canary_with_stable_response(stable: Replying, canary: Replying, better: float) -> None:
    found = asyncio.run(ask_case(stable, canary, case()))
    assert values(found, "quality") == {"canary": better}
    assert values(found, "errors") == values(found, "rejections") == {"stable": 0.0, "canary": 0.0}


def cut(path: str, body: Body) -> tuple[int, bytes]:
    return 200, b'{"choices": ['


@pytest.mark.parametrize(
    "canary",
    [
        refusing(500, "internal_error"),
        refusing(503, "engine_failed"),
        refusing(500, "what is that"),
        lambda path, body: (500, b"<html>"),
        lambda path, body: None,
        cut,
        lambda path, body: (200, {"choices": []}),
        lambda path, body: (200, b" " * (ANSWER_BYTES_MAX + 1)),
    ],
)
def test_failure_counts_as_error_not_as_quality(canary: Replying) -> None:
    found = asyncio.run(ask_case(FINE, canary, case()))
    assert values(found, "errors") == {"stable": 0.0, "canary": 1.0}
    assert values(found, "rejections") == {"stable": 0.0}
    assert values(found, "quality") == {}


def test_late_response_is_lost() -> None:
    async def ask() -> None:
        gone = asyncio.Event()

        async def hang(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            await gone.wait()
            writer.close()

        server = await asyncio.start_server(hang, "127.0.0.1", 0)
        asker = HttpModelClient()
        try:
            with pytest.raises(Lost, match="no response within"):
                await asker.ask(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}", "/", b"{}", 0.05)
        finally:
            gone.set()
            await asker.close()
            server.close()

    asyncio.run(ask())


@pytest.mark.parametrize("canary", [refusing(400, Code.INVALID_REQUEST), lambda path, body: (404, b"")])
def test_rejected_prompt_scores_zero(canary: Replying) -> None:
    found = asyncio.run(ask_case(FINE, canary, case()))
    assert values(found, "rejections") == {"stable": 0.0, "canary": 1.0}
    assert values(found, "errors") == {"stable": 0.0}
    assert values(found, "quality") == {"canary": -1.0}


@pytest.mark.parametrize("canary", [NOWHERE, refusing(503, Code.OVERLOADED), refusing(503, Code.DRAINING)])
def test_unreachable_and_full_replicas_count_as_no_error(canary: Replying | str) -> None:
    found = asyncio.run(ask_case(FINE, canary, case()))
    assert values(found, "errors") == values(found, "rejections") == {"stable": 0.0}
    assert values(found, "quality") == {}


def test_case_is_sent_as_given_with_deterministic_defaults() -> None:
    async def heard(**request: object) -> Body:
        bodies: list[Body] = []
        async with replica(FINE, bodies) as url:
            asker = HttpModelClient()
            await ask_both(asker, Party(ReplicaTarget(url, "m"), ReplicaTarget(url, "m")), case(request=request), 5.0)
            await asker.close()
        assert bodies[0] == bodies[1]
        return bodies[0]

    assert asyncio.run(heard()) == {
        "messages": [{"role": "user", "content": "France"}],
        "model": "m",
        "temperature": 0,
        "max_tokens": 256,
    }
    assert asyncio.run(heard(temperature=0.7, max_tokens=8)).items() >= {"temperature": 0.7, "max_tokens": 8}.items()
    assert "max_tokens" not in asyncio.run(heard(max_completion_tokens=8))


def test_similarity_and_judge_models_score_responses() -> None:
    stable, canary = chatting(lambda text: "It is Paris."), chatting(lambda text: "It is Rome.")
    vectors = embedding(lambda text: [1.0, 0.0] if "Paris" in text else [0.6, 0.8])
    found = asyncio.run(ask_case(stable, canary, case("similarity", reference="Paris"), {"similarity": vectors}))
    assert values(found, "quality") == {"canary": pytest.approx(-0.4)}

    judge = chatting(lambda text: "9/10" if "It is Paris." in text else "2")
    found = asyncio.run(ask_case(stable, canary, case("judge", reference="Paris"), {"judge": judge}))
    assert values(found, "quality") == {"canary": pytest.approx(-0.7)}


@pytest.mark.parametrize("scorer", ["judge", "similarity"])
@pytest.mark.parametrize("helper", [None, refusing(500, "internal_error"), chatting(lambda text: "well"), cut])
def test_unusable_judge_or_similarity_response_gives_no_score(scorer: str, helper: Replying | None) -> None:
    def strange(path: str, body: Body) -> tuple[int, Body]:
        return 200, {"choices": [{"message": {"content": "well"}}], "data": []}

    helpers = {} if helper is None else {scorer: strange if scorer == "similarity" else helper}
    found = asyncio.run(ask_case(FINE, BAD, case(scorer, reference="Paris"), helpers))
    assert values(found, "quality") == {}
    assert values(found, "errors") == {"stable": 0.0, "canary": 0.0}


def test_empty_response_needs_no_judge() -> None:
    empty = chatting(lambda text: "")
    found = asyncio.run(
        ask_case(empty, empty, case("judge", reference="Paris"), {"judge": chatting(lambda text: "10")})
    )
    assert values(found, "quality") == {"canary": 0.0}


def cases(several: int) -> list[Case]:
    one = case()
    return [Case(str(n), one.request, Scorer.EXACT, ("Paris",)) for n in range(several)]


def test_golden_round_limits_cases_and_concurrency() -> None:
    most = running = asked = 0

    async def ask(case: Case) -> None:
        nonlocal asked, most, running
        asked, running = asked + 1, running + 1
        most = max(most, running)
        await asyncio.sleep(0)
        running -= 1

    settings = GoldenSettings(file="g", at_once_max=3)
    for several in (5, 1000):
        asked = 0
        asyncio.run(golden_round(ask, settings, cases(several), Random(1)))
        assert asked == min(several, ROUND_CASES_MAX)
    assert most == settings.at_once_max


def test_golden_file_problems_are_reported(tmp_path: Path) -> None:
    file = tmp_path / "golden.jsonl"
    settings = RolloutSettings(golden=GoldenSettings(file=str(file), every_s=10))
    assert golden_problems(settings) == (f"{file}: it cannot be read: No such file or directory",)
    assert golden_per_s(settings) == 0.0
    file.write_text('{"id": "a"}\n')
    assert all(problem.startswith(f"{file}: line 1: ") for problem in golden_problems(settings))
    question = {"messages": [{"role": "user", "content": "Hi"}]}
    entry = {"id": "a", "request": question, "scorer": "judge", "reference": "Hello"}
    file.write_text(json.dumps(entry))
    assert golden_problems(settings) == (f'{file}: case "a" is scored by judge, and `rollout.judge` names no model',)
    assert golden_problems(settings.model_copy(update={"judge": "large"})) == ()
    assert golden_per_s(settings) == 0.1
    assert len(read_golden(GoldenSettings(file=str(file))).cases) == 1
    assert golden_problems(RolloutSettings()) == ()
    assert golden_per_s(RolloutSettings()) == 0.0
