"""Rollouts of the demo's own models under load, with a fault at every step: clients see no error.

`FOREBAY_ROLLOUTS=30` sets the number of rollouts; by default every fault and every moment occurs once."""

import asyncio
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import cycle, islice
from pathlib import Path

import pytest
from tests.e2e.cluster import CHAT, EMBED, Cluster, wait_for
from tests.e2e.faults.embedding import Embedder
from tests.e2e.faults.grounds import GATEWAYS, STORIES, run_folder, wait_quiet
from tests.e2e.faults.load import Client, Patient, loading
from tests.e2e.rollouts import rolling
from tests.e2e.rollouts.revisions import register, serving
from tests.e2e.rollouts.trials import FAULTS, MOMENTS, REPLICAS, Rolls, never_to_the_unready

ROLLOUTS = int(os.environ.get("FOREBAY_ROLLOUTS", "4"))
EMBEDDED = ROLLOUTS // 4
"""So many of them are of the embedding model."""
TIMEOUT_S = 400.0
"""For one rollout; nothing is known of the machine."""
TRIALS = tuple(
    (moment, FAULTS[(at + shift) % len(FAULTS)]) for shift in range(len(FAULTS)) for at, moment in enumerate(MOMENTS)
)
"""All pairs; any four that begin at a multiple of four have every moment and every fault."""
PLAN = rolling.canary((0.25, 2.0), (0.5, 600.0), settle_s=2.0)
TOLERANT = {**rolling.LOOSE, "length": {"ratio": 100}, "degenerate": {"floor": 0.9}, "refusals": {"floor": 0.9}}
"""Eight bits and four bits of one model do not say the same."""


def eight_bits(path: Path) -> str:
    """The demo's chat model as it is in the demo: converted to eight bits for its engine."""
    return register(path, "chat", str(CHAT["source"]), "openvino", threads=1)


def four_bits(path: Path) -> str:
    """The same with its own four bits, in another engine."""
    return register(path, "chat", str(CHAT["source"]), "llamacpp", threads=1)


def embedding(path: Path, **settings: int) -> str:
    """The demo's embedding model."""
    return register(path, "embed", str(EMBED["source"]), "onnx", task="embed", threads=1, **settings)


@dataclass(slots=True)
class Ground:
    """A model, two revisions of it, and who asks it: so many that get streams, and others."""

    model: str
    revisions: tuple[Callable[[Path], str], Callable[[Path], str]]
    kind: type[Client]
    streams: int
    whole: int
    requests: int = 0
    fewest: list[int] = field(default_factory=list)

    async def roll(self, cluster: Cluster, both: tuple[str, str], moment: str, fault: str) -> None:
        """One rollout."""
        texts: dict[int, str | None] = dict.fromkeys(range(STORIES))
        sizes = {"streams": self.streams, "whole": self.whole}
        async with (
            loading(cluster.gateway_port, self.model, texts, self.kind, **sizes) as load,
            rolling.watching(cluster, self.model, REPLICAS) as watch,
        ):
            rolls = Rolls(cluster, load, watch, both, patience_s=TIMEOUT_S)
            await rolls.roll(moment, fault, PLAN)
        assert load.bad() == []
        self.requests += len(load.seen)
        self.fewest += rolls.fewest


CHAT_GROUND = Ground("chat", (eight_bits, four_bits), Patient, streams=4, whole=2)
EMBED_GROUND = Ground("embed", (embedding, lambda path: embedding(path, max_batch=8)), Embedder, streams=0, whole=6)
CASES = list(islice(cycle(TRIALS), ROLLOUTS))
Place = tuple[Cluster, tuple[str, str]]


@contextmanager
def placed(ground: Ground, factory: pytest.TempPathFactory) -> Iterator[Place]:
    """A cluster of two gateways with two replicas of a model, and its revisions."""
    folder, (first, second) = factory.mktemp(ground.model), ground.revisions
    settings = {"name": ground.model, "task": ground.model, "replicas": REPLICAS, "rollout": TOLERANT}
    with serving(folder, f"e2e-real-{ground.model}", settings, first, processes=GATEWAYS) as cluster:
        yield cluster, (first(cluster.file), second(cluster.file))
        assert cluster.stop() == 0
        assert cluster.pids() == []
    print(f"\n{ground.model}: {ground.requests} requests, none failed; ready replicas, at least: {ground.fewest}")


@pytest.fixture(scope="module")
def chat(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Place]:
    """Where the demo's chat model is."""
    with placed(CHAT_GROUND, tmp_path_factory) as place:
        yield place


@pytest.fixture(scope="module")
def embed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Place]:
    """Where the demo's embedding model is."""
    with placed(EMBED_GROUND, tmp_path_factory) as place:
        yield place


def rolled(ground: Ground, place: Place, moment: str, fault: str) -> None:
    """One rollout, after which everything is as it should be."""
    cluster, both = place
    cluster.wait_ready()
    asyncio.run(ground.roll(cluster, both, moment, fault))
    wait_quiet(run_folder(cluster) / "peers", [each["url"] for each in cluster.ready_replicas(ground.model)])
    never_to_the_unready(cluster)
    wait_for("no other process is left", lambda: len(cluster.pids()) == GATEWAYS + REPLICAS)


@pytest.mark.timeout(2 * TIMEOUT_S)
@pytest.mark.parametrize(("moment", "fault"), CASES[:EMBEDDED])
def test_embedding_model_rollouts_with_faults_cause_no_client_errors(embed: Place, moment: str, fault: str) -> None:
    rolled(EMBED_GROUND, embed, moment, fault)


@pytest.mark.timeout(2 * TIMEOUT_S)
@pytest.mark.parametrize(("moment", "fault"), CASES[EMBEDDED:])
def test_chat_model_rollouts_with_faults_cause_no_client_errors(chat: Place, moment: str, fault: str) -> None:
    rolled(CHAT_GROUND, chat, moment, fault)
