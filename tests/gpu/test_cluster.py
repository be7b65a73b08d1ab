"""A cluster on a machine with a real GPU: who is placed there computes there, and `forebay nodes` shows it."""

from pathlib import Path
from typing import Any

import httpx
import numpy as np
from tests.e2e.availability.nodes import said
from tests.e2e.cluster import Cluster, running, wait_for
from tests.gpu import models

ROWS = np.ones((2, models.SIZE), np.float32)


def kind(cluster: Cluster, name: str) -> str:
    answer = httpx.get(f"{cluster.url}/v2/models/{name}/config")
    return str(answer.json()["instance_group"][0]["kind"])


def answer(cluster: Cluster, name: str) -> np.ndarray:
    tensor = {"name": "INPUT__0", "datatype": "FP32", "shape": list(ROWS.shape), "data": ROWS.ravel().tolist()}
    found = httpx.post(f"{cluster.url}/v2/models/{name}/infer", json={"inputs": [tensor]}, timeout=60)
    assert found.status_code == 200, found.text
    return np.array(found.json()["outputs"][0]["data"]).reshape(ROWS.shape)


def test_a_model_that_is_placed_on_a_gpu_computes_there_and_another_does_not(tmp_path: Path) -> None:
    models.write(tmp_path / "models")
    source = {"task": "tensor", "source": str(tmp_path / "models")}
    served = [
        {"name": "matrix", **source, "placement": {"gpus": 1, "fraction": 0.25}},
        {"name": "exported", **source},
    ]
    with running(tmp_path, "gpu", served) as cluster:
        expected = ROWS @ models.WEIGHTS + 1
        for name in ("matrix", "exported"):
            assert np.allclose(answer(cluster, name), expected, atol=1e-3)
        assert (kind(cluster, "matrix"), kind(cluster, "exported")) == ("KIND_GPU", "KIND_CPU")
        wait_for("the use of memory is seen", lambda: (used(cluster) or 0) > 100e6)
        device = seen(cluster)
        assert device["state"] == "healthy"
        assert [slot for slot in device["replicas"] if slot.startswith("matrix")]


def seen(cluster: Cluster) -> dict[str, Any]:
    """The one GPU, as `forebay nodes` has it."""
    (node,) = said(cluster, "nodes")["nodes"]
    (device,) = node["devices"]
    return dict(device)


def used(cluster: Cluster) -> int | None:
    found = seen(cluster)["memory_used_bytes"]
    return None if found is None else int(found)
