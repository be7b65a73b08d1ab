"""What holds for every test: none fails because the machine is slow.

`make check` tries fewer examples, and does not even read the folders whose tests all start models or processes.
"""

from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

HERE = Path(__file__).parent
SLOW = tuple(
    HERE / folder
    for folder in ("cli/demos", "contract/tensor", "e2e", "gpu", "modelserver/models", "modelserver/process")
)

settings.register_profile("forebay", parent=settings(), deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.register_profile("quick", parent=settings.get_profile("forebay"), max_examples=15)
settings.load_profile("forebay")


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    return True if config.option.markexpr == "not slow" and collection_path in SLOW else None


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if any(item.path.is_relative_to(folder) for folder in SLOW):
            item.add_marker(pytest.mark.slow)
    # The longest files come first: what is short fills up the end, when the others have nothing left to do.
    items.sort(key=lambda item: not item.path.is_relative_to(HERE / "e2e"))
