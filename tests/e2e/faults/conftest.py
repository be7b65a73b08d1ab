"""One cluster for all tests of this folder; each leaves it whole."""

import asyncio
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.e2e.cluster import TEST_PROCESS, Cluster, running
from tests.e2e.faults.grounds import GATEWAYS, MODELS, SIZES, STORIES
from tests.e2e.faults.load import undisturbed

Texts = dict[str, dict[int, str]]


@pytest.fixture(scope="package")
def shared_cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """Two gateways, a model with two replicas and one with four, all of the synthetic engine."""
    folder, name = Path(tmp_path_factory.mktemp("faults")), f"e2e-faults-{TEST_PROCESS}"
    with running(folder, name, MODELS, processes=GATEWAYS) as cluster:
        yield cluster


@pytest.fixture(scope="package")
def texts(shared_cluster: Cluster) -> Texts:
    """Of each model, what its stories are when nothing happens."""
    port = shared_cluster.gateway_port
    return {model: asyncio.run(undisturbed(port, model, STORIES)) for model in SIZES}


@pytest.fixture
def cluster(shared_cluster: Cluster, texts: Texts) -> Cluster:
    """The shared cluster, whole."""
    shared_cluster.wait_ready(60)
    return shared_cluster
