"""No test leaves anything open."""

import gc
from collections.abc import Iterator

import pytest
from tests.modelserver.process.rig import fds


@pytest.fixture(autouse=True)
def _nothing_is_left() -> Iterator[None]:
    before = fds()
    yield
    gc.collect()
    assert fds() == before
