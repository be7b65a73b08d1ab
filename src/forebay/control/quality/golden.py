"""Rounds over a golden set: some cases are sent to both revisions, and the responses are scored.

Cases are drawn anew each time, with replacement. So the expected value of each difference, given everything seen
before, is the mean over the whole set, which betting on the mean requires: with a fixed set repeated over and over,
one lucky response would count many times.
"""

import asyncio
from collections.abc import Awaitable, Callable, Iterator, Sequence
from itertools import islice
from pathlib import Path
from random import Random
from typing import Final, NamedTuple

from forebay.control.quality.client import ModelClient, ReplicaTarget, Reply, Unreachable, chat, embed
from forebay.core.deploy.evidence import ERRORS, GOLDEN, QUALITY, REJECTIONS, fault, rejected
from forebay.core.deploy.scoring import (
    PROBLEMS_MAX,
    Case,
    Golden,
    Scorer,
    cosine,
    golden_of,
    grade_of,
    grading,
    score,
)
from forebay.core.deploy.settings import ROUND_CASES_MAX, GoldenSettings, RolloutSettings
from forebay.core.errors import OK
from forebay.core.rollout import Arm, Observation

TOKENS_MAX: Final = 256
"""Of a response, if its case does not set a limit."""
GRADE_TOKENS_MAX: Final = 8


class Party(NamedTuple):
    """The replicas of both revisions, and those used for scoring; None: there is none."""

    stable: ReplicaTarget
    canary: ReplicaTarget
    judge: ReplicaTarget | None = None
    similarity: ReplicaTarget | None = None


def read_golden(settings: GoldenSettings) -> Golden:
    """Load the golden set of a file; a relative path is relative to the working directory."""
    try:
        return golden_of(Path(settings.file).read_bytes())
    except OSError as error:
        return Golden((), (f"it cannot be read: {error.strerror or error}",))


def golden_problems(settings: RolloutSettings) -> tuple[str, ...]:
    """Problems with the golden set, or with scorers for which no model is named; empty: none."""
    if settings.golden is None:
        return ()
    golden = read_golden(settings.golden)
    unnamed = {
        scorer
        for scorer, name in ((Scorer.JUDGE, settings.judge), (Scorer.SIMILARITY, settings.similarity))
        if name is None
    }
    lacking = (
        f'case "{case.id}" is scored by {case.scorer}, and `rollout.{case.scorer}` names no model'
        for case in golden.cases
        if case.scorer in unnamed
    )
    found = (*golden.problems, *islice(lacking, PROBLEMS_MAX))
    return tuple(f"{settings.golden.file}: {problem}" for problem in found)


def golden_per_s(settings: RolloutSettings) -> float:
    """How many cases per second will be sent; 0 without a golden set."""
    return settings.golden.per_s(len(read_golden(settings.golden).cases)) if settings.golden else 0.0


async def golden_round(
    ask: Callable[[Case], Awaitable[None]], settings: GoldenSettings, cases: Sequence[Case], rng: Random
) -> None:
    """Run as many cases as there are, up to `ROUND_CASES_MAX`, drawn with `rng`, a few concurrently."""
    room = asyncio.Semaphore(settings.at_once_max)

    async def one(case: Case) -> None:
        async with room:
            await ask(case)

    async with asyncio.TaskGroup() as tasks:
        for case in rng.choices(cases, k=min(len(cases), ROUND_CASES_MAX)):
            tasks.create_task(one(case))


async def ask_both(client: ModelClient, party: Party, case: Case, timeout_s: float) -> list[Observation]:
    """Send one case to both revisions: returns failures, and, if both responded, the canary's score minus the
    stable's."""
    request = {"temperature": 0, "max_tokens": TOKENS_MAX, **case.request}
    if "max_completion_tokens" in request and "max_tokens" not in case.request:
        del request["max_tokens"]
    async with asyncio.TaskGroup() as tasks:
        stable = tasks.create_task(_reply(client, party.stable, request, timeout_s))
        canary = tasks.create_task(_reply(client, party.canary, request, timeout_s))
    replies = stable.result(), canary.result()
    found = [each for arm, one in zip(Arm, replies, strict=True) for each in _failures(arm, one)]
    scores = await _scores(client, party, case, replies, timeout_s)
    if scores is not None:
        found.append(Observation(QUALITY, Arm.CANARY, scores[1] - scores[0], GOLDEN))
    return found


def _failures(arm: Arm, reply: Reply | None) -> Iterator[Observation]:
    """Whether a response failed, as far as that is the replica's fault."""
    if reply is not None:
        for metric, event in ((ERRORS, fault(reply.code)), (REJECTIONS, rejected(reply.code))):
            if event is not None:
                yield Observation(metric, arm, float(event), GOLDEN)


async def _reply(
    client: ModelClient, target: ReplicaTarget, request: dict[str, object], timeout_s: float
) -> Reply | None:
    try:
        return await chat(client, target, request, timeout_s)
    except Unreachable:
        return None  # it is stopping or has not started: handled elsewhere


async def _scores(
    client: ModelClient, party: Party, case: Case, replies: tuple[Reply | None, Reply | None], timeout_s: float
) -> tuple[float, float] | None:
    """The scores of both responses, the stable one's first. A request that a revision rejects scores zero."""
    worth: list[float] = []
    for each in replies:
        if each is None or not (each.code == OK or rejected(each.code)):
            return None
        found = await _score(client, party, case, each.text, timeout_s) if each.code == OK else 0.0
        if found is None:
            return None
        worth.append(found)
    return worth[0], worth[1]


async def _score(client: ModelClient, party: Party, case: Case, text: str, timeout_s: float) -> float | None:
    """The score of one response; None: it cannot be determined."""
    found = score(case, text)
    if found is not None or not text.strip():
        return found or 0.0
    if case.scorer is Scorer.JUDGE:
        return await _graded(client, party.judge, case, text, timeout_s)
    vectors = await embed(client, party.similarity, (case.reference, text), timeout_s) if party.similarity else None
    return cosine(*vectors) if vectors else None


async def _graded(
    client: ModelClient, judge: ReplicaTarget | None, case: Case, text: str, timeout_s: float
) -> float | None:
    if judge is None:
        return None
    reply = await ask_judge(client, judge, grading(case.question, case.reference, text), timeout_s)
    return None if reply is None else grade_of(reply)


async def ask_judge(client: ModelClient, judge: ReplicaTarget, question: str, timeout_s: float) -> str | None:
    """A judge's reply; None: there is none."""
    request = {
        "messages": [{"role": "user", "content": question}],
        "temperature": 0,
        "max_tokens": GRADE_TOKENS_MAX,
    }
    reply = await _reply(client, judge, request, timeout_s)
    return reply.text if reply and reply.code == OK else None
