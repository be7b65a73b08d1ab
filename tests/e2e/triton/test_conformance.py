"""Forebay answers like the recorded real Triton, except for intended differences."""

import asyncio
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from tests.e2e.cluster import REPO
from tests.e2e.triton import record, served

from forebay.cli.conformance import command
from forebay.cli.conformance.cases.scheduling import PREFIX
from forebay.cli.conformance.check import Level, Result, Verdict
from forebay.cli.conformance.known import DIFFERENCES, without_known
from forebay.cli.conformance.run import Recorded

KSERVE = Path(os.environ.get("FOREBAY_ORACLE", REPO / ".forebay/oracle")) / "kserve/bin/python"
CLIENTS = Path(__file__).with_name("kserve_checks.py")


@pytest.fixture(scope="module")
def forebay(tmp_path_factory: pytest.TempPathFactory) -> Iterator[served.Served]:
    """A server with the suite's models, none of them loaded."""
    with served.running(tmp_path_factory.mktemp("forebay")) as server:
        yield server


def test_forebay_has_only_intended_differences_from_triton(forebay: served.Served) -> None:
    recorded = command.recorded()["checks"]
    results = _observed(forebay, recorded)
    for _ in range(2):  # batches of requests sent at once show their order only if the machine has time for them
        if set(_deviations(results)) <= DIFFERENCES.keys():
            break
        results |= _observed(forebay, recorded, only=PREFIX)
    found = _deviations(results)
    surprises = [f"{name}\n{found[name]}" for name in sorted(found.keys() - DIFFERENCES.keys())]
    assert not surprises, "\n\n".join(surprises)
    assert not [each for each in without_known([*results.values()]) if each.verdict is Verdict.DEVIATES]
    assert DIFFERENCES.keys() == found.keys(), "these are no differences any more: take them out of the table"
    assert [each for each in results.values() if each.verdict is Verdict.SKIPPED] == []


def _observed(forebay: served.Served, recorded: Recorded, only: str = "") -> dict[str, Result]:
    """The results of the checks that have `only` in their name, by name."""
    results: list[Result] = []
    asked = command.Selection(forebay.url, forebay.grpc, forebay.metrics, only=only)
    asyncio.run(record.observed(asked, recorded, results.append))
    return {each.name: each for each in results}


def _deviations(results: dict[str, Result]) -> dict[str, str]:
    return {
        name: f"{each.expected}\n-- found:\n{each.found}"
        for name, each in results.items()
        if each.verdict is Verdict.DEVIATES and each.level is Level.MUST
    }


def test_forebay_passes_the_generic_conformance_checks(forebay: served.Served) -> None:
    httpx.post(f"{forebay.url}/v2/repository/models/add_sub/load", json={}, timeout=60).raise_for_status()
    checked = subprocess.run(
        [
            Path(sys.executable).with_name("forebay"),
            "conformance",
            forebay.url,
            "--grpc",
            forebay.grpc,
            "--model",
            "add_sub",
        ],
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert checked.returncode == 0, checked.stdout + checked.stderr


@pytest.mark.skipif(not KSERVE.exists(), reason="KServe's client is not there: `scripts/oracle kserve` installs it")
def test_kserve_client_works(forebay: served.Served) -> None:
    for entry in httpx.post(f"{forebay.url}/v2/repository/index", json={}, timeout=60).json():
        if entry.get("state") == "UNAVAILABLE":  # a model that failed to load keeps the server from being ready
            httpx.post(f"{forebay.url}/v2/repository/models/{entry['name']}/unload", json={}, timeout=60)
    for model in ("add_sub", "types"):
        httpx.post(f"{forebay.url}/v2/repository/models/{model}/load", json={}, timeout=60).raise_for_status()
    checked = subprocess.run(
        [KSERVE, CLIENTS, forebay.url, forebay.grpc], capture_output=True, text=True, timeout=100
    )
    assert checked.returncode == 0, checked.stdout + checked.stderr
