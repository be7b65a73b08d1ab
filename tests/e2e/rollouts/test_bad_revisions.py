"""Bad revisions are detected by real traffic and by golden sets, and rolled back; a good one is promoted."""

import asyncio
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import openai
import pytest
from tests.e2e.cluster import Cluster, wait_for
from tests.e2e.faults.grounds import STORIES
from tests.e2e.faults.load import loading, undisturbed
from tests.e2e.rollouts import rolling
from tests.e2e.rollouts.revisions import register, serving, words

GOLDEN = Path(__file__).with_name("golden.jsonl")
HALF = rolling.canary((0.5, 600.0), warm_up_s=0.5)
STEP_MS = 4.0
ANSWERS_MAX = 4000
"""Of a bad revision, until it is found out."""
ASKERS = 2
QUESTIONS = ("What is the capital of France?", "Name a color.", "What is two plus two?", "Say hello.")


@pytest.fixture
def synthetic(tmp_path: Path) -> Iterator[Cluster]:
    """A cluster of which a model has one replica, with tolerances as they are by default."""
    with serving(
        tmp_path, "e2e-worse", {"name": "chat", "task": "chat"}, lambda path: words(path, "chat", step_ms=STEP_MS)
    ) as cluster:
        yield cluster


@pytest.mark.parametrize(
    ("settings", "reasons"),
    [
        ({"step_ms": 1.5 * STEP_MS}, ("ttft", "tpot", "latency")),
        ({"step_ms": STEP_MS, "error_share": 0.02}, ("errors",)),
    ],
    ids=["half as slow again", "2 % errors"],
)
def test_slow_or_flaky_revision_is_rolled_back_without_client_errors(
    synthetic: Cluster, settings: dict[str, float], reasons: tuple[str, ...]
) -> None:
    bad = words(synthetic.file, "chat", **settings)
    port = synthetic.gateway_port

    async def main() -> None:
        texts = await undisturbed(port, "chat", STORIES)
        async with loading(port, "chat", texts) as load:
            id = await asyncio.to_thread(rolling.deploy, synthetic, "chat", bad, HALF)
            seen = await asyncio.to_thread(rolling.reached, synthetic, id, timeout_s=120.0)
            assert seen["phase"] == "rolled_back", seen
            assert any(reason in seen["why"] for reason in reasons), seen
            answers = sum(each.revision == bad for each in load.seen)
            assert 0 < answers < ANSWERS_MAX
            await load.more(2 * len(texts))
        assert load.bad() == []

    asyncio.run(main())


@contextmanager
def asking(cluster: Cluster) -> Iterator[list[str]]:
    """People who ask a real model, one question after the other; which revision has answered what."""
    over, seen = threading.Event(), list[str]()

    def ask(number: int) -> None:
        with cluster.client() as client:
            while not over.is_set():
                question: Any = [{"role": "user", "content": QUESTIONS[number % len(QUESTIONS)]}]
                try:
                    answer = client.chat.completions.with_raw_response.create(
                        model="chat", messages=question, max_tokens=12
                    )
                    seen.append(answer.headers["x-forebay-model-revision"])
                except openai.BadRequestError:
                    seen.append("refused")
                number += 1

    with ThreadPoolExecutor(ASKERS) as pool:
        futures = [pool.submit(ask, number) for number in range(ASKERS)]
        try:
            yield seen
        finally:
            over.set()
            for future in futures:
                future.result()


@pytest.fixture(scope="module")
def real(tmp_path_factory: pytest.TempPathFactory, models: dict[str, Path]) -> Iterator[Cluster]:
    """A cluster that serves the demo's chat model, and has a golden set for it."""
    golden = {"file": str(GOLDEN), "every_s": 1.0, "at_once_max": 2}
    rollout = {**rolling.LOOSE, "quality": {"drop": 0.2}, "golden": golden}
    folder = tmp_path_factory.mktemp("real")
    with serving(
        folder,
        "e2e-ruined",
        {"name": "chat", "task": "chat", "rollout": rollout},
        lambda path: real_one(path, models["good"]),
    ) as cluster:
        yield cluster


def real_one(path: Path, source: Path, **settings: int) -> str:
    """Register a real model."""
    return register(path, "chat", source, "llamacpp", threads=1, **settings)


@pytest.mark.parametrize(
    ("what", "reasons"),
    [
        ("a template that leaves the question out", ("quality",)),
        ("a template that fails", ("quality", "rejections", "errors")),
        ("a quantisation that ruins answers", ("quality", "degenerate", "length")),
    ],
)
def test_real_model_with_bad_answers_is_rolled_back(
    real: Cluster, models: dict[str, Path], what: str, reasons: tuple[str, ...]
) -> None:
    bad = real_one(real.file, models[what])
    with asking(real) as seen:
        id = rolling.deploy(real, "chat", bad, HALF)
        end = rolling.reached(real, id, timeout_s=180.0)
        assert end["phase"] == "rolled_back", end
        assert any(reason in end["why"] for reason in reasons), end
        so_far = len(seen)
        wait_for("it goes on", lambda: len(seen) > so_far + 6 * ASKERS)
    assert set(seen[-2 * ASKERS :]).isdisjoint({bad, "refused"})
    assert ("refused" in seen) is (what == "a template that fails")


def test_good_revision_of_a_real_model_is_promoted_despite_killed_control(
    real: Cluster, models: dict[str, Path]
) -> None:
    good = real_one(real.file, models["good"], concurrency=4)
    with asking(real) as seen:
        id = rolling.deploy(real, "chat", good, HALF)
        before = rolling.reached(real, id, "comparing")
        assert before["phase"] == "comparing", before
        rolling.kill_control(real)
        end = rolling.reached(real, id, timeout_s=240.0)
        assert end["phase"] == "promoted", end
        so_far = len(seen)
        wait_for("it serves everything", lambda: set(seen[so_far + 6 * ASKERS :]) == {good})
    assert "refused" not in seen
