"""The bundled traces match their notes, and have the figures measured of their sources."""

import gzip
import hashlib
import json
import re
from random import Random

import pytest

from forebay.sim.load.change import between, faster, first
from forebay.sim.load.describe import describe
from forebay.sim.load.named import DATA, MADE, NAMES, TRACES, workload
from forebay.sim.load.traces.lines import BadTrace
from forebay.sim.load.values import Arrival, Workload

pytestmark = pytest.mark.slow

BYTES_MAX = 1_500_000
"""Of all data: it is in every wheel."""


def test_bundled_traces_match_their_notices_and_are_small() -> None:
    noted = dict(re.findall(r"^ {4}([0-9a-f]{64})  (\S+)$", (DATA / "README.md").read_text(), re.MULTILINE))
    files = {path.relative_to(DATA).as_posix(): path for path in DATA.rglob("*") if path.is_file()}
    sums = {name: hashlib.sha256(path.read_bytes()).hexdigest() for name, path in files.items()}
    del sums["README.md"]

    assert sums == {name: digest for digest, name in noted.items()}
    assert set(TRACES.values()) <= set(files)
    assert sum(path.stat().st_size for path in files.values()) <= BYTES_MAX


def test_the_conversation_trace_has_its_published_figures() -> None:
    figures = describe(workload("mooncake", Random(1)))

    assert workload("mooncake", Random(1)).name == "mooncake (3 s ticks jittered)"
    assert (figures.requests, figures.tenants) == (12_031, 0)
    assert figures.rate_per_s == pytest.approx(3.40, abs=0.01)
    assert figures.span_s == pytest.approx(3_537, abs=4)
    assert (figures.prompt_tokens.p50, figures.output_tokens.p50) == (6_909, 350)
    assert figures.prompt_tokens.p95 == pytest.approx(39_550, rel=0.001)
    assert figures.output_tokens.p95 == pytest.approx(698, abs=1)
    assert (round(figures.prompt_tokens.mean), round(figures.output_tokens.mean)) == (12_035, 343)
    assert figures.hit_share == pytest.approx(0.374, abs=0.0005)


def test_jitter_removes_clock_tick_bursts_of_the_conversation_trace() -> None:
    with gzip.open(DATA / TRACES["mooncake"]) as lines:
        as_written = Workload("raw", [Arrival(json.loads(line)["timestamp"] / 1000, 1, 1) for line in lines])

    assert describe(as_written).gap_cv == pytest.approx(3.03, abs=0.005)
    assert describe(workload("mooncake", Random(1))).gap_cv == pytest.approx(1.03, abs=0.05)


def test_every_conversation_begins_with_the_same_block() -> None:
    assert {arrival.blocks[0] for arrival in workload("mooncake", Random(1)).arrivals} == {0}


def test_the_coding_trace_has_its_published_figures() -> None:
    figures = describe(workload("azure", Random(1)))

    assert figures.requests == 8_819
    assert figures.span_s == pytest.approx(3_436, abs=1)
    assert figures.gap_cv == pytest.approx(13.15, abs=0.01)
    assert (figures.prompt_tokens.p50, figures.output_tokens.p50) == (1_469, 13)
    assert (round(figures.prompt_tokens.p95), round(figures.output_tokens.p95)) == (7_303, 90)
    assert (round(figures.prompt_tokens.mean), round(figures.output_tokens.mean)) == (2_048, 28)
    assert figures.hit_share is None


def test_multi_client_hour_has_its_clients_as_tenants() -> None:
    figures = describe(workload("servegen", Random(1)))

    assert figures.tenants > 50
    assert 3_590 < figures.span_s <= 3_600
    assert 3 < figures.rate_per_s < 10


def test_week_workload_has_published_rates_and_lengths() -> None:
    week = workload("azure-week", Random(1))
    figures = describe(week)
    days = [len(between(week, day * 86_400, (day + 1) * 86_400).arrivals) for day in range(7)]
    windows = [len(between(week, at, at + 3_600).arrivals) / 3_600 for at in range(0, 7 * 86_400, 3_600)]

    assert figures.requests == pytest.approx(1_209_600, rel=0.005)
    assert figures.prompt_tokens.p50 == pytest.approx(1_916, rel=0.01)
    assert figures.prompt_tokens.p95 == pytest.approx(7_663, rel=0.01)
    assert (figures.output_tokens.p50, round(figures.output_tokens.mean)) == (13, 28)
    assert max(windows) / figures.rate_per_s == pytest.approx(3.1, abs=0.2)
    assert min(days) < 0.5 * max(days)


@pytest.mark.parametrize("name", [name for name in NAMES if name != "azure-week"])
def test_workload_is_determined_by_its_seed(name: str) -> None:
    made = workload(name, Random(7))

    assert made.name.startswith(name)
    assert list(made.arrivals) == list(workload(name, Random(7)).arrivals)
    if name in MADE or name == "mooncake":
        assert list(made.arrivals) != list(workload(name, Random(8)).arrivals)


def test_unknown_workload_name_is_read_as_a_file() -> None:
    path = DATA / TRACES["azure"]

    assert workload(str(path), Random(1)).name == path.name
    with pytest.raises(BadTrace, match=r"moonkake: no such file, and none of the names: mooncake, azure, "):
        workload("moonkake", Random(1))


def test_workload_name_lists_its_changes() -> None:
    whole = workload("azure", Random(1))
    part = first(faster(between(whole, 600, 1_800), 2.0), 10)

    assert part.name == "azure (600 to 1800 s) (x2) (first 10)"
    assert len(part.arrivals) == 10
