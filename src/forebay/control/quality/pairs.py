"""Compares pairs of responses to one mirrored request: how much worse the new revision's are."""

from typing import Final

from forebay.control.quality.client import ModelClient, ReplicaTarget, embed
from forebay.control.quality.golden import ask_judge
from forebay.core.deploy.answers import degenerate, refuses
from forebay.core.deploy.evidence import AGREEMENT, PREFERENCE, VALIDITY
from forebay.core.deploy.samples import PAIR_CHARS_MAX, Pair
from forebay.core.deploy.scoring import comparing, cosine, is_json, preference, preferred
from forebay.core.rollout import Arm, Observation

TIMEOUT_S: Final = 60.0
"""For each request to the models that compare."""


def by_itself(pair: Pair) -> Observation:
    """What a pair shows without a comparing model: the similarity of its vectors, or the validity of its texts."""
    if pair.alike is not None:
        return Observation(AGREEMENT, Arm.CANARY, pair.alike - 1.0, pair.stratum)
    return validity(pair)


def validity(pair: Pair) -> Observation:
    """The difference in validity of the two texts."""
    difference = int(_valid(pair.canary, pair.schema)) - int(_valid(pair.stable, pair.schema))
    return Observation(VALIDITY, Arm.CANARY, float(difference), pair.stratum)


async def compared(
    client: ModelClient, pair: Pair, judge: ReplicaTarget | None, similarity: ReplicaTarget | None
) -> list[Observation]:
    """What comparing models say of a pair: how much its responses differ, and which is better. Empty if they fail."""
    found: list[Observation] = []
    if similarity is not None:
        alike = await _alike(client, pair, similarity)
        if alike is not None:
            found.append(Observation(AGREEMENT, Arm.CANARY, alike - 1.0, pair.stratum))
    if judge is not None:
        better = await _better(client, pair, judge)
        if better is not None:
            found.append(Observation(PREFERENCE, Arm.CANARY, better, pair.stratum))
    return found


def _valid(text: str, schema: str) -> bool:
    """A client's schema is not checked: that could take unbounded time, and engines enforce it. A truncated text
    cannot be checked for being JSON."""
    whole = len(text) < PAIR_CHARS_MAX
    return not (degenerate(text) or refuses(text)) and (not (schema and whole) or is_json(text))


async def _alike(client: ModelClient, pair: Pair, similarity: ReplicaTarget) -> float | None:
    if pair.stable == pair.canary:
        return 1.0
    if not (pair.stable.strip() and pair.canary.strip()):
        return 0.0
    vectors = await embed(client, similarity, (pair.stable, pair.canary), TIMEOUT_S)
    return cosine(*vectors) if vectors else None


async def _better(client: ModelClient, pair: Pair, judge: ReplicaTarget) -> float | None:
    if pair.stable == pair.canary:
        return 0.0
    places: list[int | None] = []
    for first, second in ((pair.stable, pair.canary), (pair.canary, pair.stable)):
        reply = await ask_judge(client, judge, comparing(pair.prompt, first, second), TIMEOUT_S)
        places.append(None if reply is None else preferred(reply))
    return preference(*places)
