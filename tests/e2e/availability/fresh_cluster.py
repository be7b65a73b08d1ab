"""A fresh cluster: its store and its run folder start empty, whatever earlier clusters of that name left."""

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import yaml
from tests.e2e.cluster import TEST_HOME, Cluster, launch
from tests.e2e.rollouts.revisions import write_cluster


@contextmanager
def fresh_cluster(folder: Path, name: str, model: dict[str, Any], **more: Any) -> Iterator[Cluster]:
    """A ready cluster of one model."""
    path = folder / f"{name}.yaml"
    ports = write_cluster(path, name, [model])
    path.write_text(yaml.safe_dump(yaml.safe_load(path.read_text()) | more))
    shutil.rmtree(TEST_HOME / "run" / name, ignore_errors=True)  # what an earlier one was like, and its failures
    cluster = launch(path, name, ports)
    try:
        cluster.wait_ready()
        yield cluster
        assert cluster.stop() == 0
    finally:
        cluster.stop()
