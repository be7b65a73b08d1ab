"""Pairs of responses to mirrored requests."""

import asyncio
import json
from contextlib import AsyncExitStack

import pytest
from tests.control.quality.fake import Body, Replying, chatting, embedding, refusing, replica

from forebay.control.quality.client import EMBEDDED_CHARS_MAX, HttpModelClient, ReplicaTarget
from forebay.control.quality.pairs import compared, validity
from forebay.core.deploy.samples import PAIR_CHARS_MAX, Pair
from forebay.core.rollout import Arm, Observation

LOOP = "and so on and on and so on and on " * 20
VECTORS = embedding(lambda text: [1.0, 0.0] if "Paris" in text else [0.6, 0.8])
FIRST, BETTER = (
    chatting(lambda text: "A"),
    chatting(lambda text: "A" if text.index("Rome") < text.index("Paris") else "B"),
)


def pair(stable: str, canary: str, schema: str = "") -> Pair:
    return Pair("1", "256", "What is the capital of France?", stable, canary, schema)


@pytest.mark.parametrize(
    ("stable", "canary", "schema", "value"),
    [
        ("Paris", "Rome", "", 0.0),
        ("Paris", "", "", -1.0),
        ("Paris", LOOP, "", -1.0),
        ("Paris", "I'm sorry, but I can't help with that.", "", -1.0),
        ("", "Paris", "", 1.0),
        ("{}", '{"a": 1}', "{}", 0.0),
        ("{}", '{"a": 1', "{}", -1.0),
        ("{}", json.dumps([*range(PAIR_CHARS_MAX)])[:PAIR_CHARS_MAX], "{}", 0.0),
        ("Sure!", "Sure!", '{"type": "object"}', 0.0),
    ],
)
def test_validity_of_responses(stable: str, canary: str, schema: str, value: float) -> None:
    assert validity(pair(stable, canary, schema)) == Observation("validity", Arm.CANARY, value, "256")


def found(one: Pair, judge: Replying | None = None, similarity: Replying | None = None) -> dict[str, float]:
    async def ask() -> list[Observation]:
        async with AsyncExitStack() as stack:
            asker = HttpModelClient()
            stack.push_async_callback(asker.close)
            judging, alike = [
                None if each is None else ReplicaTarget(await stack.enter_async_context(replica(each)), "m")
                for each in (judge, similarity)
            ]
            return await compared(asker, one, judging, alike)

    return {each.metric: each.value for each in asyncio.run(ask())}


def test_agreement_is_the_embedding_similarity() -> None:
    assert found(pair("Paris", "Rome"), similarity=VECTORS) == {"agreement": pytest.approx(-0.4)}
    assert found(pair("Paris", "Paris!"), similarity=VECTORS) == {"agreement": pytest.approx(0.0)}
    assert found(pair("Paris", " "), similarity=VECTORS) == {"agreement": -1.0}


def test_long_responses_are_truncated_for_embedding() -> None:
    long = "Paris " * EMBEDDED_CHARS_MAX
    seen: list[int] = []

    def short(text: str) -> list[float]:
        seen.append(len(text))
        return [1.0, 0.0]

    assert found(pair(long, long + "!"), similarity=embedding(short)) == {"agreement": 0.0}
    assert seen == [EMBEDDED_CHARS_MAX] * 2


def test_a_judge_is_asked_in_both_orders() -> None:
    assert found(pair("Paris", "Rome"), judge=FIRST) == {"preference": 0.0}
    assert found(pair("Paris", "Rome"), judge=BETTER) == {"preference": 1.0}
    assert found(pair("Rome", "Paris"), judge=BETTER) == {"preference": -1.0}


def test_equal_answers_are_not_sent_to_the_judge() -> None:
    def never(path: str, body: Body) -> None:
        raise AssertionError(path)

    assert found(pair("Paris", "Paris"), never, never) == {"agreement": 0.0, "preference": 0.0}


@pytest.mark.parametrize(
    "answer", [refusing(500, "internal_error"), lambda path, body: None, chatting(lambda text: "?")]
)
def test_a_judge_without_a_verdict_adds_no_observation(answer: Replying) -> None:
    assert found(pair("Paris", "Rome"), answer, answer) == {}
    assert found(pair("Paris", "Rome")) == {}
