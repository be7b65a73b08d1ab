"""Bad revisions of the demo's chat model are made once."""

from pathlib import Path

import pytest
from tests.e2e.rollouts.revisions import UNANSWERED, UNKNOWN, demo_gguf, with_ruined_weights, with_template


@pytest.fixture(scope="session")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The demo's chat model as it is, and what can become of it."""
    good, folder = demo_gguf(), Path(tmp_path_factory.mktemp("models"))
    return {
        "good": good,
        "a template that leaves the question out": with_template(good, folder / "unanswered.gguf", UNANSWERED),
        "a template that fails": with_template(good, folder / "unknown.gguf", UNKNOWN),
        "a quantisation that ruins answers": with_ruined_weights(good, folder / "ruined.gguf"),
    }
