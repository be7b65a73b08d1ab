"""No test may leak file descriptors."""

import gc
from collections.abc import Iterator

import pytest
from tests.modelserver.process.rig import fds


@pytest.fixture(autouse=True)
def _nothing_is_left() -> Iterator[None]:
    gc.collect()  # what earlier tests have left is theirs
    before = fds()
    yield
    gc.collect()
    assert not fds().items() - before.items()
