"""No test leaves anything open. They start processes: `make check` leaves them to `make test`."""

import gc
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.modelserver.process.rig import fds


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.path.is_relative_to(Path(__file__).parent):
            item.add_marker(pytest.mark.slow)


@pytest.fixture(autouse=True)
def _nothing_is_left() -> Iterator[None]:
    gc.collect()  # what earlier tests have left is theirs
    before = fds()
    yield
    gc.collect()
    assert not fds().items() - before.items()
