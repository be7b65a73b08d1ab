"""The quality task beside the reconcile loop: what it sends, for how long, and that no error stops it."""

import asyncio
import json
from collections import Counter
from collections.abc import Awaitable, Callable
from dataclasses import replace
from pathlib import Path

import msgspec
import pytest

from forebay.control.quality.client import CHAT, Answer, ReplicaTarget, Unreachable
from forebay.control.quality.quality import FOUND_MAX, PAIRS_MAX, Aim, Quality
from forebay.core.deploy.course import COURSES, Kind
from forebay.core.deploy.rollout import Phase, Rollout
from forebay.core.deploy.samples import Pair
from forebay.core.deploy.settings import GoldenSettings, RolloutSettings
from forebay.core.rollout import Arm, Observation
from forebay.sim.loop import run as virtual

ROLLOUT = Rollout("1", "chat", "r-old", "r-new", COURSES[Kind.CANARY], since=0.0, phase=Phase.COMPARING)
CASE = {
    "id": "a",
    "request": {"messages": [{"role": "user", "content": "Capital of France?"}]},
    "scorer": "exact",
    "expected": "Paris",
}


class ModelClient:
    """Answers at once: the stable replica well, the canary badly, the models that compare as they should."""

    def __init__(self) -> None:
        self.asked: Counter[str] = Counter()
        self.mistake: Exception | None = None

    async def ask(self, url: str, path: str, body: bytes, timeout_s: float) -> Answer:
        self.asked[url] += 1
        await asyncio.sleep(0)
        if self.mistake is not None:
            raise self.mistake
        if path != CHAT:
            several = len(json.loads(body)["input"])
            return Answer(200, msgspec.json.encode({"data": [{"embedding": [1.0, 0.0]}] * several}))
        said = {"stable": "Paris", "canary": "Rome", "judge": "B"}[url]
        return Answer(200, msgspec.json.encode({"choices": [{"message": {"content": said}}]}))


class QualityRig:
    """A running `Quality` and its notes."""

    def __init__(self, golden: Path) -> None:
        self.asker = ModelClient()
        self.told: list[str] = []
        self.quality = self.quality_of(self.asker)
        settings = RolloutSettings(golden=GoldenSettings(file=str(golden), every_s=1))
        self.aim = Aim(ROLLOUT, settings, "stable", "canary")

    def quality_of(self, asker: ModelClient) -> Quality:
        return Quality(asker, note=lambda kind, text: self.told.append(f"{kind}: {text}"))

    async def until(self, true: Callable[[], bool]) -> None:
        async with asyncio.timeout(10):
            while not true():
                await asyncio.sleep(0.001)


@pytest.fixture
def golden(tmp_path: Path) -> Path:
    file = tmp_path / "golden.jsonl"
    file.write_text(json.dumps(CASE))
    return file


def running(bench: QualityRig, test: Callable[[], Awaitable[None]]) -> None:
    async def both() -> None:
        async with asyncio.TaskGroup() as tasks:
            task = tasks.create_task(bench.quality.run())
            await test()
            task.cancel()

    virtual(both(), seconds_max=60.0)


def named(found: list[Observation]) -> Counter[str]:
    return Counter(each.metric for each in found)


def test_golden_set_is_repeated_while_a_rollout_compares(golden: Path) -> None:
    bench = QualityRig(golden)

    async def test() -> None:
        bench.quality.aim([bench.aim])
        bench.quality.aim([bench.aim])
        await bench.until(lambda: bench.asker.asked["canary"] == 2)  # a second round has begun
        await bench.until(lambda: bench.asker.asked["stable"] == 2)
        found = bench.quality.drain("1")
        assert named(found)["quality"] >= 1
        assert all(each.value == -1.0 for each in found if each.metric == "quality")
        assert bench.quality.drain("2") == []
        bench.quality.aim([])
        await asyncio.sleep(0)
        assert bench.quality.drain("1") == []

    running(bench, test)
    assert bench.told == []


@pytest.mark.parametrize("lacking", ["stable_url", "canary_url"])
def test_golden_prompts_are_sent_only_once_both_revisions_are_ready(golden: Path, lacking: str) -> None:
    bench = QualityRig(golden)

    async def test() -> None:
        bench.quality.aim([replace(bench.aim, **{lacking: None})])
        for _ in range(20):
            await asyncio.sleep(0)
        assert not bench.asker.asked
        bench.quality.aim([bench.aim])
        await bench.until(lambda: bench.asker.asked["canary"] == 1)

    running(bench, test)


def test_a_broken_golden_file_is_reported_and_nothing_is_sent(golden: Path) -> None:
    golden.write_text("nonsense")
    bench = QualityRig(golden)

    async def test() -> None:
        bench.quality.aim([bench.aim])
        await bench.until(lambda: bool(bench.told))
        bench.quality.take([])

    running(bench, test)
    assert bench.told == [f"trouble: quality: {golden}: line 1: not a JSON object"]
    assert not bench.asker.asked


def test_quality_task_survives_errors(golden: Path) -> None:
    bench = QualityRig(golden)
    bench.asker.mistake = RuntimeError("the moon is full")

    async def test() -> None:
        bench.quality.aim([bench.aim])
        await bench.until(lambda: bool(bench.told))
        bench.asker.mistake = Unreachable()
        before = bench.asker.asked.total()
        await bench.until(lambda: bench.asker.asked.total() > before)
        bench.asker.mistake = None
        await bench.until(lambda: named(bench.quality.drain("1"))["quality"] > 0)

    running(bench, test)
    assert len(bench.told) == 1


def test_hanging_replica_does_not_block_other_observations(golden: Path) -> None:
    golden.write_text("\n".join(json.dumps({**CASE, "id": str(n)}) for n in range(6)))
    bench = QualityRig(golden)
    hang = asyncio.Event()

    class Hanging(ModelClient):
        async def ask(self, url: str, path: str, body: bytes, timeout_s: float) -> Answer:
            if url == "canary" and self.asked[url] == 1:
                await hang.wait()
            return await super().ask(url, path, body, timeout_s)

    bench.quality = bench.quality_of(Hanging())

    async def test() -> None:
        bench.quality.aim([bench.aim])
        found: Counter[str] = Counter()

        def some() -> bool:
            found.update(named(bench.quality.drain("1")))
            return found["quality"] > 0

        await bench.until(some)
        bench.quality.aim([replace(bench.aim, canary_url=None)])  # the rest of the round is not asked
        hang.set()

    running(bench, test)


def pairs(several: int, rollout: str = "1") -> list[Pair]:
    return [Pair(rollout, "256", "Capital of France?", "Paris", f"Rome {n}") for n in range(several)]


def test_pairs_are_scored_by_the_available_models(golden: Path) -> None:
    bench = QualityRig(golden)
    plain = replace(bench.aim, settings=RolloutSettings())
    helped = replace(plain, judge=ReplicaTarget("judge", "j"), similarity=ReplicaTarget("similarity", "s"))

    async def test() -> None:
        bench.quality.take(pairs(1))
        assert bench.quality.drain("1") == []  # it was not aimed at
        bench.quality.aim([plain])
        bench.quality.take([*pairs(2), *pairs(1, "other")])
        assert named(bench.quality.drain("1")) == {"validity": 2}
        bench.quality.aim([helped])
        bench.quality.take(pairs(3))
        found: list[Observation] = []

        def all_there() -> bool:
            found.extend(bench.quality.drain("1"))
            return named(found) == {"validity": 3, "agreement": 3, "preference": 3}

        await bench.until(all_there)
        bench.quality.take(pairs(3))
        bench.quality.aim([])  # what waits is of no use any more
        for _ in range(20):
            await asyncio.sleep(0)
        assert bench.quality.drain("1") == []

    running(bench, test)
    assert bench.told == []


def test_embedding_pairs_use_the_similarity_from_the_gateway(golden: Path) -> None:
    bench = QualityRig(golden)
    bench.quality.aim([replace(bench.aim, settings=RolloutSettings(), similarity=ReplicaTarget("similarity", "s"))])
    bench.quality.take([Pair("1", "256", "", "", "", alike=0.75)])
    assert bench.quality.drain("1") == [Observation("agreement", Arm.CANARY, -0.25, "256")]
    assert not bench.quality._pairs


def test_unfetched_observations_and_uncompared_pairs_are_bounded(golden: Path) -> None:
    bench = QualityRig(golden)
    plain = replace(bench.aim, settings=RolloutSettings())
    bench.quality.aim([plain])
    for _ in range(FOUND_MAX // 1000 + 1):
        bench.quality.take(pairs(1000))
    assert len(bench.quality.drain("1")) == FOUND_MAX
    bench.quality.aim([replace(plain, similarity=ReplicaTarget("similarity", "s"))])
    bench.quality.take(pairs(2 * PAIRS_MAX))

    async def test() -> None:
        found: Counter[str] = Counter()

        def enough() -> bool:
            found.update(named(bench.quality.drain("1")))
            return found["agreement"] >= PAIRS_MAX

        await bench.until(enough)
        assert found["agreement"] == PAIRS_MAX
        assert found["validity"] == 2 * PAIRS_MAX

    running(bench, test)
