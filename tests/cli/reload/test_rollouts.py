"""Reloading the cluster file during a rollout: which changes are accepted, and which are not."""

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest
from tests.control.deploying.rig import SWIFT, Rig, controlled
from tests.control.deploying.world import NEW, FaultyStore, World

from forebay.cli.registry.artifacts import prepare_models
from forebay.cli.reload import UNCHANGED, Reloader
from forebay.cli.settings import FileText, parse_cluster
from forebay.control.plan import Plan, make_plan
from forebay.core.cluster import Cluster
from forebay.core.deploy.rollout import Phase
from forebay.store.database import open_store

pytestmark = pytest.mark.slow
TEST_S = 60
MODEL = {"name": "chat", "task": "chat", "source": "synthetic", "engine": "synthetic", "replicas": 2}
OTHER = {**MODEL, "name": "other", "replicas": 1}


def document(*models: dict[str, Any]) -> bytes:
    return json.dumps({"gateway": {"records": {}}, "models": models}).encode()


class Bed:
    """A control that rolls out, and a file that can change."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.text = document(MODEL, OTHER)

    def read(self) -> Cluster:
        return parse_cluster(FileText("f.yaml", self.text), {}, otherwise="nothing was changed")

    def plan(self, cluster: Cluster) -> Plan:
        prepared = prepare_models(cluster, self.world.folder, lambda _: lambda *_: None)
        return make_plan(cluster, prepared, self.world.places, "0")

    def reloader(self, rig: Rig) -> Reloader:
        cluster = self.read()
        return Reloader(rig.control, rig.journal, cluster, self.plan(cluster), self.read, self.plan)


def test_reload_accepts_changes_unrelated_to_the_rollout(tmp_path: Path) -> None:
    async def test(bed: Bed) -> None:
        async with controlled(bed.world, bed.plan(bed.read())) as rig:
            again = bed.reloader(rig)
            await rig.until(bed.world.places.snapshot.exists)
            await rig.deploy(course=SWIFT)
            await rig.until(lambda: NEW in bed.world.alive().values())
            bed.text = document({**MODEL, "engine": {"name": "synthetic", "dimensions": 65}}, OTHER)
            [problem, unchanged] = (await again()).problems
            assert problem.startswith("models.chat: declares another revision while rollout chat:1 is under way")
            assert unchanged == UNCHANGED
            bed.text = document({**MODEL, "replicas": 3}, OTHER)
            assert (await again()).problems == ()
            await rig.reaches(Phase.PROMOTED)
            await rig.until(lambda: [*bed.world.alive().values()].count(NEW) == 3 and len(bed.world.alive()) == 4)
            bed.text = document({**MODEL, "engine": {"name": "synthetic", "dimensions": 65}}, OTHER)
            bed.world.store.down = "the server is away"
            assert (await again()).problems == ("the server is away", UNCHANGED)
            bed.world.store.down = ""
            assert (await again()).problems == ()
            await rig.until(lambda: NEW not in bed.world.alive().values())
            await rig.deploy(course=SWIFT)
            bed.text = document(OTHER)
            assert (await again()).problems == ()
            assert rig.standing.rollout.why == "the model is no longer in the cluster file"

    store = FaultyStore(open_store(f"sqlite:///{tmp_path / 'store.db'}"))

    async def bounded() -> None:
        async with asyncio.timeout(TEST_S):
            await test(Bed(World(tmp_path, store)))

    try:
        asyncio.run(bounded())
    finally:
        store.close()
