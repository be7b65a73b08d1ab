"""The published errors of the engine model are reproduced."""

from statistics import fmean, median

import pytest

from forebay.sim.engine import calibration
from forebay.sim.engine.calibration import CAVEATS, SUBSETS, Errors, Point, formula_tpot_s, points, simulated

pytestmark = pytest.mark.slow

FIRST_TOKEN = "time to first token, replica"
FORMULA, REPLICA = "time per token, formula", "time per token, replica"
TABLE = {
    ("70B FP8, vLLM", FORMULA): (90, 5.9, 13.0, 1.01),
    ("70B FP8, vLLM", REPLICA): (90, 5.3, 13.5, 1.04),
    ("70B FP8, vLLM", FIRST_TOKEN): (90, 10.3, 22.7, 1.04),
    ("70B FP8, TensorRT-LLM, H200", FORMULA): (54, 22.6, 36.8, 0.82),
    ("70B FP8, TensorRT-LLM, H200", REPLICA): (54, 20.5, 35.7, 0.83),
    ("8B FP8, vLLM, H200", FORMULA): (10, 75.5, 143.1, 0.58),
    ("8B FP8, vLLM, H200", REPLICA): (10, 66.0, 125.2, 0.62),
    ("8B FP8, SGLang, H200", FORMULA): (16, 10.2, 20.3, 1.07),
    ("8B BF16, TensorRT-LLM, H100", FORMULA): (42, 3.2, 5.9, 1.02),
    ("8B BF16, TensorRT-LLM, H100", REPLICA): (42, 5.5, 9.4, 1.06),
    ("all", FORMULA): (212, 13.2, 38.5, 0.99),
    ("all", REPLICA): (212, 12.7, 33.0, 1.03),
}
"""Points, mean and 95th percentile of errors in percent, median of measured by predicted."""


def vllm(gpu: str, gpus: int) -> list[Point]:
    return [p for p in points() if (p.engine, p.model, p.gpu, p.gpus) == ("vllm", "70B", gpu, gpus)]


def test_published_errors_are_reproduced() -> None:
    errors = calibration.errors()

    assert len(errors) == 3 * len(SUBSETS)
    assert {(row.subset, row.what) for row in errors} >= set(TABLE)
    for row in errors:
        if (row.subset, row.what) in TABLE:
            assert figures(row) == TABLE[row.subset, row.what]


def figures(row: Errors) -> tuple[int, float, float, float]:
    return row.points, round(100 * row.error_mean, 1), round(100 * row.error_p95, 1), round(row.ratio_median, 2)


@pytest.mark.parametrize(("gpu", "ratios"), [("h100_sxm", [0.99, 1.04, 1.09]), ("h200_sxm", [0.95, 1.00, 1.04])])
def test_more_gpus_are_a_little_slower_than_predicted(gpu: str, ratios: list[float]) -> None:
    medians = [median(p.tpot_s / formula_tpot_s(p) for p in vllm(gpu, gpus)) for gpus in (2, 4, 8)]

    assert [round(each, 2) for each in medians] == ratios


def test_queueing_for_the_kv_cache_matches_the_measurement() -> None:
    full = [p for p in vllm("h100_sxm", 2) if p.ttft_s > 5.0]

    assert len(full) == 3
    for point in full:
        times = simulated(point)
        assert times.tpot_s == pytest.approx(point.tpot_s, rel=0.1)
        assert times.ttft_s == pytest.approx(point.ttft_s, rel=0.55)


def test_error_of_a_wrong_assumption_of_precision_is_published() -> None:
    unstated = [p for p in points() if p.precision == "bf16"]

    off = [abs(formula_tpot_s(p._replace(precision="fp8")) / p.tpot_s - 1) for p in unstated]

    assert round(fmean(off), 2) == 0.23
    assert any("23 % off instead of 3 %" in caveat for caveat in CAVEATS)
