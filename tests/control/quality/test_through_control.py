"""A golden set decides a rollout: the whole of control on virtual time, without client traffic."""

import asyncio
import json
from collections.abc import Mapping
from pathlib import Path

import msgspec
import pytest
from tests.control.deploying.rig import QUICK, RULES, Rig, inline, play
from tests.control.deploying.world import NEW, OLD, World, WorldProber

from forebay.control.deploying import Deployments, RolloutRequest
from forebay.control.journal import Journal
from forebay.control.loop import Controller
from forebay.control.quality.client import Answer
from forebay.control.quality.quality import Quality
from forebay.control.snapshot import SnapshotFile
from forebay.core.deploy.course import Course, Kind
from forebay.core.deploy.rollout import Phase
from forebay.obs.metrics import Metrics
from forebay.store.rollouts import Rollouts

pytestmark = pytest.mark.slow

CAPITALS = {"France": "Paris", "Japan": "Tokyo", "Italy": "Rome", "Spain": "Madrid", "Egypt": "Cairo"}
CASES = "\n".join(
    json.dumps(
        {
            "id": land,
            "request": {"messages": [{"role": "user", "content": land}]},
            "scorer": "exact",
            "expected": capital,
        }
    )
    for land, capital in CAPITALS.items()
)
NOT_NEEDED = ("errors", "ttft", "tpot", "latency", "length")


class Replicas:
    """Whoever is asked answers as its revision does."""

    def __init__(self, world: World, answers: Mapping[str, Mapping[str, str]]) -> None:
        self._world = world
        self._answers = answers

    async def ask(self, url: str, path: str, body: bytes, timeout_s: float) -> Answer:
        await asyncio.sleep(0)
        host, port = url.removeprefix("http://").split(":")
        (revision,) = {r.revision for r in self._world.routes.replicas if (r.host, r.port) == (host, int(port))}
        question = msgspec.json.decode(body)["messages"][-1]["content"]
        said = self._answers[revision].get(question, "")
        return Answer(200, msgspec.json.encode({"choices": [{"message": {"content": said}}]}))


async def started(world: World, golden: Path, answers: Mapping[str, Mapping[str, str]]) -> Rig:
    rules = {name: {"required": False} for name in NOT_NEEDED}
    plan = world.plan(rollout={"golden": {"file": str(golden), "every_s": 1}, **rules})
    journal = Journal(world.places.log, world.journal.append)
    quality = Quality(Replicas(world, answers), note=journal.note)
    records = Rollouts(lambda: world.store, "test")
    deployments = Deployments(records, world.shelf, inline, note=journal.note, quality=quality)
    await deployments.begin(plan)
    control = Controller(
        plan,
        world.provider,
        WorldProber(world),
        snapshot=SnapshotFile(world.places.snapshot),
        journal=journal,
        metrics=Metrics(),
        rules=RULES,
        deployments=deployments,
    )
    return Rig(world, control, deployments, journal, asyncio.get_running_loop().create_task(control.run()))


@pytest.mark.parametrize(
    ("canary", "phase", "why"),
    [
        (CAPITALS, Phase.PROMOTED, f"{NEW} serves everything"),
        ({}, Phase.ROLLED_BACK, "quality (score) is worse than tolerated"),
        ({**CAPITALS, "Egypt": "Giza"}, Phase.ROLLED_BACK, "quality (score) is worse than tolerated"),
    ],
    ids=["as good", "knows nothing", "has forgotten one of five"],
)
def test_golden_set_decides_a_rollout_without_traffic(
    tmp_path: Path, canary: Mapping[str, str], phase: Phase, why: str
) -> None:
    golden = tmp_path / "golden.jsonl"
    golden.write_text(CASES)

    async def test(world: World) -> None:
        rig = await started(world, golden, {OLD: CAPITALS, NEW: canary})
        try:
            await rig.ready()
            await rig.deployments.deploy(RolloutRequest("chat", "new", QUICK, unchecked=True), "ann")
            await rig.reaches(phase)
            assert rig.standing.rollout.why.startswith(why)
        finally:
            await rig.kill()

    play(tmp_path, test)


@pytest.mark.parametrize(("canary", "phase"), [(CAPITALS, Phase.PROMOTED), ({}, Phase.ROLLED_BACK)])
def test_blue_green_can_roll_back_while_old_replicas_are_kept(
    tmp_path: Path, canary: Mapping[str, str], phase: Phase
) -> None:
    golden = tmp_path / "golden.jsonl"
    golden.write_text(CASES)
    course = Course(Kind.BLUE_GREEN, (), start_timeout_s=60.0, warm_up_s=1.0, settle_s=60.0)

    async def test(world: World) -> None:
        rig = await started(world, golden, {OLD: CAPITALS, NEW: canary})
        try:
            await rig.ready()
            await rig.deployments.deploy(RolloutRequest("chat", "new", course), "ann")
            await rig.reaches(Phase.SETTLING)
            await rig.reaches(phase)
        finally:
            await rig.kill()

    play(tmp_path, test)
