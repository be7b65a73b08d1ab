"""Tests that need one of NVIDIA's GPUs with a PyTorch that computes on it; elsewhere they are left out."""

import os
from pathlib import Path

import pytest

from forebay.engines.tensor.gpus import computing, visible

HERE = Path(__file__).parent
MISSING = "needs a GPU of NVIDIA's, and PyTorch built with CUDA"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if visible(os.environ) and "pytorch" in computing():
        return
    for item in items:
        if item.path.is_relative_to(HERE):
            item.add_marker(pytest.mark.skip(MISSING))
