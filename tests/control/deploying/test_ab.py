"""A/B tests through the whole of control: effect sizes with confidence intervals."""

from dataclasses import replace
from pathlib import Path

import pytest
from tests.control.deploying.rig import controlled, play
from tests.control.deploying.world import NEW, World, wait

from forebay.core.deploy.course import COURSES, Kind
from forebay.core.deploy.rollout import Phase
from forebay.core.rollout.effects import BLOCKS_MIN, Effect
from forebay.core.rollout.planning import Step

pytestmark = pytest.mark.slow

COURSE = replace(COURSES[Kind.AB], steps=(Step(0.5, 400.0),), warm_up_s=2.0)
REQUESTS_PER_S = 20.0


def effects(folder: Path, slowness: float, errors: float) -> tuple[dict[str, Effect], dict[str, Effect]]:
    """Of each metric, soon after the beginning and at the end."""
    told: list[dict[str, Effect]] = []

    async def story(world: World) -> None:
        world.requests_per_s = REQUESTS_PER_S
        world.slowness[NEW] = slowness
        world.errors[NEW] = errors
        async with controlled(world) as rig:
            await rig.ready()
            await rig.deploy(course=COURSE)
            await rig.reaches(Phase.COMPARING)
            await wait(COURSE.warm_up_s + BLOCKS_MIN / 4)
            told.append({each.metric: each for each in rig.standing.effects})
            await rig.reaches(Phase.JUDGED)
            told.append({each.metric: each for each in rig.standing.effects})

    play(folder, story)
    return told[0], told[1]


@pytest.mark.parametrize("slowness", [1.0, 1.5, 0.7])
def test_ab_confidence_interval_contains_the_true_ratio(tmp_path: Path, slowness: float) -> None:
    early, late = effects(tmp_path, slowness, errors=0.0)
    for metric in ("latency", "ttft", "tpot"):
        assert (early[metric].low, early[metric].high) == (0.0, float("inf"))
        assert late[metric].kind == "ratio"
        assert late[metric].low < slowness < late[metric].high
        assert late[metric].high / late[metric].low < 1.2
        assert (late[metric].low > 1.0) == (slowness > 1.0)


def test_ab_errors_have_a_confidence_interval(tmp_path: Path) -> None:
    _, late = effects(tmp_path, 1.0, errors=0.05)
    assert late["errors"].kind == "odds ratio"
    assert late["errors"].low > 1.0
