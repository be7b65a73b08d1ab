"""The recorded answers match the real Triton; skipped where it is not installed (`scripts/oracle`)."""

import asyncio
from pathlib import Path

import pytest
from tests.e2e.triton import oracle, record

from forebay.cli.conformance import command
from forebay.cli.conformance.check import Result, Verdict

pytestmark = pytest.mark.skipif(bool(oracle.missing()), reason=oracle.missing())

PARTS = ("infer/binary/right", "forms/", "grpc/infer", "streams/", "metrics/")
"""Of the checks: the whole recording takes minutes, and `python -m tests.e2e.triton.record` compares all of it."""


def test_triton_still_matches_the_recording(tmp_path: Path) -> None:
    results: list[Result] = []
    recorded = command.recorded()["checks"]
    with oracle.running(tmp_path) as triton:
        for part in PARTS:
            asked = command.Selection(triton.url, triton.grpc, triton.metrics, only=part)
            asyncio.run(record.observed(asked, recorded, results.append))
    assert len(results) > 50
    assert [each for each in results if each.verdict is Verdict.DEVIATES] == []
