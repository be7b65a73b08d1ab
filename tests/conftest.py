"""What holds for every test: none fails because the machine is slow.

`make check` tries fewer examples, and does not even read the folders and files whose tests all start models or
processes; a run of the slow tests does not read the files that have none. Tests of modules that can be compiled are
run with these compiled (`-m compiled`), the slow ones of `make test` only so.
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
COMPILED = tuple(
    HERE / place
    for place in (
        "contract/tensor",
        "core",
        "gateway",
        "modelserver",
        "net",
        "wire/http2",
        "wire/oip",
        "wire/test_transcript.py",
    )
)
INTERPRETED = tuple(HERE / folder for folder in ("core/leading", "core/registry", "core/rollout"))
"""What of them imports nothing that is compiled."""
ALL_SLOW = re.compile(r"^pytestmark = \[?pytest\.mark\.slow\b", re.MULTILINE)

settings.register_profile("forebay", parent=settings(), deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.register_profile("quick", parent=settings.get_profile("forebay"), max_examples=15)
settings.load_profile("forebay")


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    return True if is_left_out(collection_path, config.option.markexpr) else None


def is_left_out(path: Path, asked: str) -> bool:
    """Whether that folder or file has no test that is asked for."""
    if path.suffix != ".py":
        return asked == "not slow" and path in SLOW
    match asked:
        case "not slow":
            return ALL_SLOW.search(path.read_text()) is not None
        case "slow":
            return not has_slow(path)
        case "compiled":
            return not has_compiled(path)
        case "slow and not compiled":
            return not has_slow(path) or (has_compiled(path) and "mark.interpreted" not in path.read_text())
    return False


@cache
def has_compiled(path: Path) -> bool:
    """True if tests of the file are of modules that can be compiled."""
    return _within(path, COMPILED) and not _within(path, INTERPRETED)


def _within(path: Path, places: tuple[Path, ...]) -> bool:
    return path in places or any(place in path.parents for place in places)


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
        if has_compiled(item.path) and not item.get_closest_marker("interpreted"):
            item.add_marker(pytest.mark.compiled)
        if all_slow(item.path):
            item.add_marker(pytest.mark.slow)
        elif item.get_closest_marker("slow") and not has_slow(item.path):
            raise pytest.UsageError(f"{item.path}: no run of the slow tests would find those in here")
    # The longest files come first: what is short fills up the end, when the others have nothing left to do.
    from_end_to_end = cache(lambda path: HERE / "e2e" in path.parents)
    items.sort(key=lambda item: not from_end_to_end(item.path))
