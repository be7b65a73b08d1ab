"""Shadows of the demo's embedding model: matching vectors are distinguished from those of another pooling."""

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from tests.e2e.cluster import EMBED, Cluster, wait_for
from tests.e2e.rollouts import rolling
from tests.e2e.rollouts.revisions import register, serving

SHADOW = {"kind": "shadow", "steps": [{"share": 0.9, "time_s": 600.0}], "warm_up_s": 0.1}
MODEL = {"name": "embed", "task": "embed", "rollout": {"agreement": {"drop": 0.03}}}
"""With the wrong pooling the mean cosine is 0.94."""
PATIENCE_S = 180.0
"""For a verdict; nothing is known of the machine."""


def embedding(path: Path, **settings: Any) -> str:
    """The demo's embedding model."""
    return register(path, "embed", str(EMBED["source"]), "onnx", task="embed", threads=1, **settings)


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """A cluster that serves it."""
    with serving(tmp_path_factory.mktemp("vectors"), "e2e-vectors", MODEL, embedding) as it:
        yield it


@contextmanager
def asking(cluster: Cluster) -> Iterator[None]:
    """Somebody asks for vectors all the time, by turns as lists and in base64, of one text and of two."""
    over = threading.Event()

    def ask() -> None:
        number = 0
        with cluster.client() as client:
            while not over.is_set():
                number += 1
                texts = [f"Story number {number}: it was at sea that I first saw her."] * (1 + number % 2)
                format: Any = ("float", "base64")[number // 2 % 2]
                answer = client.embeddings.create(model="embed", input=texts, encoding_format=format)
                assert len(answer.data) == len(texts)

    with ThreadPoolExecutor(1) as pool:
        asked = pool.submit(ask)
        try:
            yield
        finally:
            over.set()
            asked.result()


@pytest.mark.parametrize(
    ("settings", "finding"),
    [({"max_batch": 8}, "fine"), ({"pooling": "mean"}, "worse")],
    ids=["alike", "another pooling"],
)
def test_shadow_reports_whether_embeddings_agree(cluster: Cluster, settings: dict[str, Any], finding: str) -> None:
    id = rolling.deploy(cluster, "embed", embedding(cluster.file, **settings), SHADOW)

    def agreement() -> dict[str, Any]:
        cluster.status()  # for which control looks at everything, requests too
        verdict = rolling.standing(cluster, id)["verdict"]
        found: list[dict[str, Any]] = verdict["findings"] if verdict else []
        return next((each for each in found if each["metric"] == "agreement"), {"finding": "open"})

    def known() -> dict[str, Any] | None:
        found = agreement()
        return found if found["finding"] != "open" else None

    with asking(cluster):
        found = wait_for("it is known", known, PATIENCE_S)
    assert found is not None
    print(f"\n{settings}: {found['seen']}; {found['canary_samples']} pairs")
    assert found["finding"] == finding, found
    rolling.command(cluster, id, "promote")
    assert rolling.reached(cluster, id)["phase"] == "judged"
