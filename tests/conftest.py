"""What holds for every test: none fails because the machine is slow.

`make check` tries fewer examples, and does not even read the folders and files whose tests all start models or
processes; a run of the slow tests does not read the files that have none.
"""

import gc
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

HERE = Path(__file__).parent
SLOW = tuple(
    HERE / folder
    for folder in ("cli/demos", "contract/tensor", "e2e", "gpu", "modelserver/models", "modelserver/process")
)
ALL_SLOW = re.compile(r"^pytestmark = \[?pytest\.mark\.slow\b", re.MULTILINE)

settings.register_profile("forebay", parent=settings(), deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.register_profile("quick", parent=settings.get_profile("forebay"), max_examples=15)
settings.load_profile("forebay")


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    path, asked = collection_path, config.option.markexpr
    if asked == "not slow" and (path in SLOW or (path.suffix == ".py" and ALL_SLOW.search(path.read_text()))):
        return True
    if asked == "slow" and path.suffix == ".py" and not has_slow(path):
        return True
    return None


@cache
def has_slow(path: Path) -> bool:
    """True if slow tests may be in the file: all those of its folder are, or it or the folder's fixtures say so."""
    if any(folder in path.parents for folder in SLOW):
        return True
    return any("mark.slow" in each.read_text() for each in (path, path.parent / "conftest.py") if each.exists())


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Iterator[None]:
    """Modules and tests stay to the end: no collection of garbage need look at them, neither while they are read
    nor after.
    """
    gc.disable()
    try:
        return (yield)
    finally:
        gc.collect()
        gc.freeze()
        gc.enable()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    all_slow = cache(lambda path: any(folder in path.parents for folder in SLOW))
    for item in items:
        if all_slow(item.path):
            item.add_marker(pytest.mark.slow)
        elif item.get_closest_marker("slow") and not has_slow(item.path):
            raise pytest.UsageError(f"{item.path}: no run of the slow tests would find those in here")
    # The longest files come first: what is short fills up the end, when the others have nothing left to do.
    from_end_to_end = cache(lambda path: HERE / "e2e" in path.parents)
    items.sort(key=lambda item: not from_end_to_end(item.path))
