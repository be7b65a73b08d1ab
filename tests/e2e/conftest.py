"""One demo cluster (two chat replicas, one embedding replica) serves all tests that leave it healthy."""

from collections.abc import Iterator
from pathlib import Path

import openai
import pytest
from tests.e2e.cluster import CHAT, EMBED, TEST_PROCESS, Cluster, running


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Everything here starts whole processes and real models."""
    for item in items:
        if "e2e" in item.path.parts:
            item.add_marker(pytest.mark.timeout(400))


@pytest.fixture(scope="session")
def shared_demo(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """The demo cluster, started once in each test process.

    The hang limit is short, so that hangs are repaired within a test.
    """
    chat = {**CHAT, "replicas": 2, "engine_hang_s": 12}
    folder, models = Path(tmp_path_factory.mktemp("demo")), [chat, {**EMBED, "replicas": 1}]
    with running(folder, f"e2e-demo-{TEST_PROCESS}", models) as cluster:
        yield cluster


@pytest.fixture
def demo(shared_demo: Cluster) -> Cluster:
    """The shared demo cluster, healthy again after whatever the test before did to it."""
    shared_demo.wait_ready(120)
    return shared_demo


@pytest.fixture
def client(demo: Cluster) -> Iterator[openai.OpenAI]:
    """The official client on the demo cluster."""
    with demo.client() as client:
        yield client
