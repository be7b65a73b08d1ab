"""The arithmetic of a bench report."""

import math
import statistics

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from forebay.cli.bench.stats import CODES_MAX, About, Report, Sample, Samples, Slo, good, quantile, report, spread

ABOUT = About("http://x/v1", "chat", "chat", "closed loop, 1 at once", {"seed": 0}, True, False, Slo())


def sample(ttft_s: float = 0.1, decode_s: float = 0.9, tokens: int = 10, counted: bool = False) -> Sample:
    return Sample(0.0, 0.0, ttft_s, decode_s, ttft_s + decode_s, 20, tokens, counted)


def samples(*all_of_them: Sample, errors: tuple[str, ...] = ()) -> Samples:
    found = Samples()
    for each in all_of_them:
        found.add(each)
    for code in errors:
        found.fail(code)
    return found


@given(st.lists(st.floats(0, 1e6), min_size=2, max_size=200))
def test_quantiles_equal_those_of_the_standard_library(values: list[float]) -> None:
    expected = statistics.quantiles(values, n=100, method="inclusive")

    for percent in (50, 95, 99):
        assert quantile(sorted(values), percent / 100) == pytest.approx(expected[percent - 1], rel=1e-9, abs=1e-9)


@given(st.lists(st.floats(0, 1e6), min_size=1, max_size=200))
def test_quantiles_are_ordered_and_within_the_values(values: list[float]) -> None:
    found = spread(values)

    assert found is not None
    assert found.p50 <= found.p95 <= found.p99 <= found.max
    assert found.max == pytest.approx(max(values) * 1000, abs=0.001)
    assert found.count == len(values)


def test_no_samples_have_no_spread() -> None:
    assert spread([]) is None
    assert spread([math.nan]) is None


def test_time_per_token_leaves_out_the_first_token() -> None:
    found = samples(sample(ttft_s=0.5, decode_s=0.9, tokens=10))

    assert list(found.tpot_s) == pytest.approx([0.1])


def test_single_token_answer_has_no_time_per_token() -> None:
    found = samples(sample(decode_s=0.0, tokens=1), sample(tokens=10))

    assert math.isnan(found.tpot_s[0])
    shown = spread(found.tpot_s)
    assert shown is not None
    assert shown.count == 1


def test_rates_count_answers_and_errors_separately() -> None:
    found = report(ABOUT, samples(sample(), sample(), errors=("429 queue_full",)), 2.0, interrupted=False)

    assert found.requests == 3
    assert found.answered == 2
    assert found.requests_per_s == 1.0
    assert found.output_tokens_per_s == 10.0
    assert found.prompt_tokens_per_s == 20.0
    assert found.errors == {"429 queue_full": 1}


@pytest.mark.parametrize(
    ("counted", "source"), [((False, False), "usage"), ((True, True), "chunks"), ((True, False), "mixed")]
)
def test_report_has_the_source_of_token_counts(counted: tuple[bool, ...], source: str) -> None:
    assert report(ABOUT, samples(*(sample(counted=c) for c in counted)), 1.0, False).tokens_from == source


def test_goodput_requires_every_slo_and_counts_errors_as_misses() -> None:
    slo = Slo(ttft_ms=200, tpot_ms=150, e2e_ms=5000)
    about = msgspec.structs.replace(ABOUT, slo=slo)
    found = samples(sample(), sample(ttft_s=0.3), sample(decode_s=2.0), sample(), errors=("502",))

    assert good(found, slo) == 2
    goodput = report(about, found, 4.0, False).goodput
    assert goodput is not None
    assert goodput.share == 0.4
    assert goodput.requests_per_s == 0.5


def test_single_token_answer_meets_any_time_per_token_slo() -> None:
    assert good(samples(sample(decode_s=0.0, tokens=1)), Slo(tpot_ms=1)) == 1


def test_without_an_slo_there_is_no_goodput() -> None:
    assert report(ABOUT, samples(sample()), 1.0, False).goodput is None


def test_plain_answers_have_no_token_times() -> None:
    found = report(msgspec.structs.replace(ABOUT, streaming=False), samples(sample()), 1.0, False)

    assert found.ttft_ms is None
    assert found.tpot_ms is None
    assert found.e2e_ms is not None


def test_error_codes_beyond_the_limit_are_counted_as_other() -> None:
    found = samples(errors=tuple(f"code {n}" for n in range(CODES_MAX + 40)))

    assert len(found.errors) == CODES_MAX + 1
    assert found.errors["other"] == 40
    assert found.failed == CODES_MAX + 40


def test_run_without_samples_has_a_report() -> None:
    found = report(ABOUT, Samples(), 0.0, interrupted=True)

    assert found.requests == 0
    assert found.requests_per_s == 0.0
    assert msgspec.json.decode(msgspec.json.encode(found), type=Report) == found
