"""The page on routing shows what was measured, losses as well as wins."""

import json
from pathlib import Path

import pytest
from bench.routing.page import generated, tables, verdict, write

from forebay.sim.report.figures import Estimate

ROOT = Path(__file__).parents[2]
FIGURES = ["goodput", "ttft_mean_s", "imbalance"]


def seeds(*values: tuple[float, float, float]) -> dict[str, list[float]]:
    return {str(seed): list(each) for seed, each in enumerate(values)}


RESULTS = {
    "figures": FIGURES,
    "best": {"load": {"gie": "gie.load"}},
    "grid": {
        "load x1, as it is": {
            "cpr": seeds((0.90, 1.0, 1.1), (0.92, 1.2, 1.1)),
            "better": seeds((0.96, 0.5, 1.1), (0.981, 0.7, 1.1)),
            "worse": seeds((0.50, 2.0, 1.1), (0.521, 2.2, 1.1)),
            "alike": seeds((0.95, 1.3, 1.1), (0.87, 1.0, 1.1)),
            "unfinished": seeds((0.5, 1.3, 1.1)),
        },
        "load x1, 4 gateways": {
            "cpr": seeds((0.90, 1.0, 1.1), (0.92, 1.2, 1.1)),
            "lmetric": seeds((0.96, 0.5, 1.1), (0.981, 0.7, 1.1)),
            "gie.load": seeds((0.50, 2.0, 1.1), (0.521, 2.2, 1.1)),
        },
    },
    "published": {
        "8 replicas": {
            "cpr": seeds((0.9, 1.5, 1.2)),
            "plain_random": seeds((0.9, 10.0, 1.0)),
            "plain_least_requests": seeds((0.9, 2.0, 1.0)),
            "smg_cache_aware": seeds((0.9, 3.0, 1.0)),
        }
    },
}


def test_the_tables_of_the_page_are_those_of_the_results() -> None:
    results = json.loads((ROOT / "bench/routing/results.json").read_text())
    page = (ROOT / "docs/routing.md").read_text()

    assert generated(page) == tables(results).strip(), "run: python bench/routing/run.py --tables"


@pytest.mark.parametrize(
    ("difference", "better", "expected"),
    [
        (Estimate(0.2, 0.1), 1, 1),
        (Estimate(-0.2, 0.1), 1, -1),
        (Estimate(-0.2, 0.1), -1, 1),
        (Estimate(0.1, 0.1), 1, 0),
        (Estimate(0.2, None), 1, 0),
        (Estimate(0.0, 0.0), 1, 0),
    ],
)
def test_only_an_interval_without_zero_is_a_win_or_a_loss(difference: Estimate, better: int, expected: int) -> None:
    assert verdict(difference, better) == expected


def test_losses_are_bold_ties_are_slanted_and_wins_are_plain() -> None:
    made = tables(RESULTS)

    assert "| `better` | **97.0 % (-6.0 ± 0.6)** |" in made
    assert "| `worse` | 51.0 % (+40.0 ± 0.6) |" in made
    assert "| `alike` | *91.0 % (+0.0 ± 63.5)* |" in made
    assert "| `better` | **0.60 (+0.50 ± 0.00)** |" in made
    assert "| `worse` | 2.10 (-1.00 ± 0.00) |" in made
    assert "unfinished" not in made
    assert "| 4 gateways | load x1 | 91.0 % |  |  | **-6.0 ± 0.6** | +40.0 ± 0.6 |" in made


def test_wins_ties_and_losses_are_counted_over_all_cells() -> None:
    made = tables(RESULTS)

    assert "| `lmetric` | 1 | 0 / 0 / 1 | 0 / 0 / 1 |" in made
    assert "| `worse` | 1 | 1 / 0 / 0 | 1 / 0 / 0 |" in made
    assert "| `alike` | 1 | 0 / 1 / 0 | 0 / 1 / 0 |" in made


def test_goals_of_the_published_experiment_are_met_or_missed() -> None:
    made = tables(RESULTS)

    assert "| 8 replicas | 10.00 (work 1.00) | 2.00 (work 1.00) | 3.00 (work 1.00) | 1.50 (work 1.20) |" in made
    assert "- 8 replicas: 0.15 of random (met), 0.75 of load only (missed), work 1.20 (missed)" in made


def test_writing_replaces_the_tables_alone(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("before\n<!-- grid:begin -->\nold\n<!-- grid:end -->\nafter old\n")
    write(page, RESULTS)

    assert page.read_text().startswith("before\n<!-- grid:begin -->\nGoodput, 2 seeds")
    assert page.read_text().endswith("\n<!-- grid:end -->\nafter old\n")
