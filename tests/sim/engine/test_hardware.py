"""Hardware data: figures calculated elsewhere are reproduced here."""

import json
from importlib import resources

import pytest
from hypothesis import given
from hypothesis import strategies as st

from forebay.sim.engine import Hardware, Start, StepTime, hardware, rows, start_s

ROWS = st.sampled_from(rows())
TOKENS = st.integers(0, 100_000)
Work = tuple[int, float, int, int]
WORK: st.SearchStrategy[Work] = st.tuples(st.integers(1, 100_000), st.floats(0.0, 1e10), TOKENS, TOKENS)


@pytest.mark.parametrize(
    ("of", "decode_ms", "prefill_tokens_per_s", "kv_ktokens"),
    [
        (("a100_sxm", "8B", 1, "bf16"), (11.86, 17.83, 37.78), (16_360, 14_709), 448),
        (("a100_sxm", "70B", 4, "bf16"), (27.19, 36.37, 46.11), (6_073, 5_973), 483),
        (("h100_sxm", "8B", 1, "bf16"), (6.18, 10.35, 17.74), (47_072, 41_018), 448),
        (("h100_sxm", "70B", 4, "bf16"), (14.86, 19.09, 23.56), (15_732, 14_203), 483),
        (("h100_sxm", "70B", 8, "bf16"), (10.12, 12.26, 14.43), (23_837, 23_796), 1396),
        (("h200_sxm", "8B", 1, "bf16"), (4.86, 7.57, 13.40), (47_187, 41_192), 897),
        (("h200_sxm", "70B", 4, "bf16"), (12.27, 15.07, 18.09), (16_020, 15_099), 1203),
        (("h200_sxm", "70B", 8, "bf16"), (7.90, 10.24, 11.73), (25_647, 24_518), 2836),
        (("h100_sxm", "70B", 2, "fp8"), (17.15, 22.38, 31.47), (12_370, 13_348), 241),
        (("h100_sxm", "70B", 4, "fp8"), (11.04, 14.66, 19.50), (18_483, 20_539), 698),
        (("h200_sxm", "70B", 8, "fp8"), (7.25, 9.32, 11.33), (28_355, 30_693), 3050),
    ],
)
def test_hardware_row_is_close_to_its_measured_latencies(
    of: tuple[str, str, int, str],
    decode_ms: tuple[float, ...],
    prefill_tokens_per_s: tuple[int, int],
    kv_ktokens: int,
) -> None:
    row = hardware(*of)
    step_s = row.step.step_s

    assert row.name == "{}/{}/tp{}/{}".format(*of)
    steps = [1e3 * step_s(n, 0, n * context, n) for n, context in ((1, 1024), (64, 1024), (32, 8192))]
    assert steps == pytest.approx(decode_ms, rel=0.15)
    speeds = [n / step_s(n, n * n / 2, 0, 0) for n in (2048, 8192)]
    assert speeds == pytest.approx(prefill_tokens_per_s, rel=0.20)
    assert row.kv_tokens // 1000 == pytest.approx(kv_ktokens, abs=1)


def test_unknown_row_error_lists_the_known_ones() -> None:
    with pytest.raises(ValueError, match=r"known for h100_sxm/70B/tp1/fp8; known: .*h100_sxm/70B/tp2/fp8, "):
        hardware("h100_sxm", "70B", 1, "fp8")


def test_hardware_data_names_its_sources() -> None:
    data = resources.files("forebay.sim.engine") / "data"

    assert len(rows()) == len(json.loads((data / "steps.json").read_text())["rows"]) == 17
    assert "Apache License, Version 2.0" in (data / "NOTICE.txt").read_text()


@given(ROWS, WORK, st.integers(1, 1000))
def test_step_time_never_decreases_with_more_work(row: Hardware, work: Work, more: int) -> None:
    new, square, context, sequences = work
    step_s = row.step.step_s
    least_s = step_s(*work)

    assert 0.0 < least_s <= step_s(new + more, square, context, sequences)
    assert least_s <= step_s(new, square + more, context, sequences)
    assert least_s <= step_s(new, square, context + more, sequences + more)


@given(ROWS, WORK, st.sampled_from([0.8, 1.25]))
def test_scaled_hardware_scales_the_whole_step(row: Hardware, work: Work, factor: float) -> None:
    scaled = row.scaled(factor)

    assert scaled.step.step_s(*work) == pytest.approx(factor * row.step.step_s(*work))
    assert (scaled.name, scaled.kv_tokens) == (row.name, row.kv_tokens)


def test_formula_matches_its_documentation() -> None:
    step = StepTime(1.0, 3.0, 2.0, 2.0, 5.0, 7.0, 11.0)

    assert step.step_s(2, 10.0, 100, 1000) == 1.0 + 5.0 + 50.0 + 700.0 + 11000.0


@pytest.mark.parametrize(
    ("start", "seconds_8b", "seconds_70b"),
    [
        (Start.STANDBY, (0, 0), (0, 0)),
        (Start.PREWARMED, (3, 5), (5, 15)),
        (Start.LOCAL, (75, 100), (75, 100)),
        (Start.COLD, (230, 310), (290, 310)),
    ],
)
def test_start_time_follows_from_the_class(
    start: Start, seconds_8b: tuple[int, int], seconds_70b: tuple[int, int]
) -> None:
    low, high = seconds_8b
    assert low <= start_s(hardware("h100_sxm", "8B", 1), start) <= high
    low, high = seconds_70b
    assert low <= start_s(hardware("h100_sxm", "70B", 4), start) <= high
