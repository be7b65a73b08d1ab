"""The e-values: their mean where there is no effect, by enumeration of all outcomes."""

import math
from itertools import combinations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from forebay.core.rollout import bets, odds, ranks, sketch
from forebay.core.rollout.values import Cell, Swing

CELLS = st.builds(
    lambda stable, canary, events: Cell(stable, events[0] % (stable + 1), canary, events[1] % (canary + 1)),
    st.integers(1, 12),
    st.integers(1, 12),
    st.tuples(st.integers(0, 12), st.integers(0, 12)),
)
FIGURES = st.lists(st.integers(0, 40), min_size=2, max_size=8)


def outcomes(cell: Cell) -> list[Cell]:
    """The ways in which the events of a block can fall on its arms."""
    events = cell.stable_events + cell.canary_events
    return [
        Cell(cell.stable, events - canary, cell.canary, canary)
        for canary in range(max(0, events - cell.stable), min(events, cell.canary) + 1)
    ]


def chances(cell: Cell, ratio: float) -> list[float]:
    """Of the outcomes, if the odds ratio is this."""
    ways = [
        math.comb(cell.canary, to.canary_events) * math.comb(cell.stable, to.stable_events) * ratio**to.canary_events
        for to in outcomes(cell)
    ]
    return [way / sum(ways) for way in ways]


@settings(max_examples=50)
@given(CELLS, st.sampled_from([0.5, 1.0, 2.0]), st.integers(-odds.SIDE, odds.SIDE))
def test_event_likelihoods_have_mean_one_at_the_tolerated_odds_ratio(cell: Cell, ratio: float, index: int) -> None:
    found = [odds.with_block(odds.NOTHING, outcome, ratio) for outcome in outcomes(cell)]
    worth = [math.exp(logs[odds.SIDE + index] - logs[odds.SIDE]) for logs in found]

    at_edge = sum(chance * e for chance, e in zip(chances(cell, ratio), worth, strict=True))
    within = sum(chance * e for chance, e in zip(chances(cell, ratio / 2), worth, strict=True))

    assert at_edge == pytest.approx(1.0)
    assert within <= 1.0 + 1e-9 or index < 0


@settings(max_examples=50)
@given(FIGURES, st.integers(1, 7))
def test_rank_e_values_have_mean_one_under_exchangeability(figures: list[int], canaries: int) -> None:
    canaries = min(canaries, len(figures) - 1)
    places = list(combinations(range(len(figures)), canaries))
    blocks = [
        ranks.ranked([figures[i] for i in chosen], [x for i, x in enumerate(figures) if i not in chosen])
        for chosen in places
    ]

    for sign in range(len(ranks.SIGNED)):
        mean = sum(math.exp(block.gains[sign]) for block in blocks) / len(places)
        assert mean <= 1.0 + 1e-9
        if len(set(figures)) == len(figures):
            assert mean == pytest.approx(1.0)
    assert sum(block.z for block in blocks) == pytest.approx(0.0, abs=1e-9)
    if len(set(figures)) == len(figures):
        assert sum(block.z**2 for block in blocks) / len(places) == pytest.approx(1.0)


def test_rank_e_values_grow_for_the_arm_with_larger_values() -> None:
    gains = ranks.ranked([5.0, 6.0], [1.0, 2.0, 3.0]).gains

    assert ranks.larger(gains).log > 0 > ranks.smaller(gains).log


@given(st.floats(0.0, 0.5), st.floats(0.1, 1.0), st.integers(0, len(bets.NOTHING) - 1))
def test_bets_have_mean_one_at_the_tolerated_drop(drop: float, spread: float, index: int) -> None:
    low, high = max(-1.0, -drop - spread), min(1.0, -drop + spread)
    chance = (-drop - low) / (high - low)

    mean = sum(
        share * math.exp(bets.with_difference(bets.NOTHING, difference, drop)[index])
        for share, difference in ((chance, high), (1 - chance, low))
    )

    assert mean == pytest.approx(1.0)


def test_floor_e_values_have_mean_one_at_the_floor_and_grow_on_either_side() -> None:
    floor = 0.01
    hit, missed = odds.floor_evidence(1, 1, floor), odds.floor_evidence(1, 0, floor)

    for with_event, without in zip(hit, missed, strict=True):
        assert floor * math.exp(with_event.log) + (1 - floor) * math.exp(without.log) == pytest.approx(1.0)
    assert odds.floor_evidence(100, 10, floor)[0].log > 3
    assert odds.floor_evidence(100, 10, floor)[1].log < 0
    assert odds.floor_evidence(2000, 0, floor)[1].log > 3
    assert odds.floor_evidence(2000, 0, floor)[0].log < 0


def test_either_combines_e_values_by_their_mean_and_both_by_their_minimum() -> None:
    strong, weak = odds.Evidence(4.0, 5.0), odds.Evidence(-1.0, 2.0)

    assert odds.either(strong, weak).log == pytest.approx(math.log((math.exp(4) + math.exp(-1)) / 2))
    assert odds.either(strong, weak).best == 5.0
    assert odds.both(strong, weak) == weak


def test_uninformative_block_changes_nothing() -> None:
    assert odds.with_block(odds.NOTHING, Cell(10, 0, 2, 0), 2.0) is odds.NOTHING
    assert odds.surprise(Cell(10, 0, 2, 0)) is None
    assert ranks.with_swing((), None) == ()
    assert math.isnan(odds.likely(odds.NOTHING, 2.0))
    assert odds.interval(odds.NOTHING, 2.0, 0.05) == (0.0, math.inf)


@given(CELLS)
def test_surprise_has_mean_zero_and_variance_one(cell: Cell) -> None:
    found = [odds.surprise(outcome) for outcome in outcomes(cell)]
    known = [z for z in found if z is not None]
    if not known:
        return

    assert sum(c * z for c, z in zip(chances(cell, 1.0), known, strict=True)) == pytest.approx(0.0, abs=1e-9)
    assert sum(c * z * z for c, z in zip(chances(cell, 1.0), known, strict=True)) == pytest.approx(1.0)


def test_odds_ratio_interval_shrinks_around_the_true_value() -> None:
    logs = odds.NOTHING
    for _ in range(60):
        logs = odds.with_block(logs, Cell(100, 10, 100, 20), 1.0)
    low, high = odds.interval(logs, 1.0, 0.05)

    assert low < 2.25 < high < 3.5
    assert low > 1.5
    assert odds.likely(logs, 1.0) == pytest.approx(2.25, rel=0.2)


def test_correlated_blocks_stretch_evidence_and_alternating_ones_do_not() -> None:
    quick: tuple[Swing, ...] = ()
    spells: tuple[Swing, ...] = ()
    shifted: tuple[Swing, ...] = ()
    for index in range(1024):
        quick = ranks.with_swing(quick, 1.0 if index % 2 else -1.0)
        spells = ranks.with_swing(spells, 1.0 if index // 16 % 2 else -1.0)
        shifted = ranks.with_swing(shifted, 3.0)

    assert ranks.stretch(quick[1:]) == ranks.stretch(()) == 1.0
    assert ranks.stretch(spells) == 16.0 * 2
    assert ranks.stretch(shifted) == 1.0, "a lasting difference is what is looked for"
    assert ranks.stretch(spells, 4.0) == 8.0
    assert ranks.usual(()) == ranks.usual((Swing(1.0),)) == 1.0
    assert ranks.usual((Swing(None, 4, 12.0),)) == 3.0
    assert len(spells) <= ranks.LEVELS


def test_number_of_swings_grows_logarithmically() -> None:
    swings: tuple[Swing, ...] = ()
    for _ in range(3 * 2**ranks.LEVELS):
        swings = ranks.with_swing(swings, 1.0)

    assert len(swings) == ranks.LEVELS


@settings(max_examples=40)
@given(st.lists(st.floats(1e-5, 1e5), min_size=1, max_size=60), st.sampled_from([0.5, 0.9, 0.95]))
def test_sketch_quantile_is_within_ten_percent(figures: list[float], share: float) -> None:
    exact = sorted(figures)[math.ceil(share * len(figures)) - 1]

    found = sketch.quantile(sketch.with_figures({}, figures), share, 1)

    assert found is not None
    assert exact * 0.999 <= found <= exact * 1.101


def test_sketch_quantile_needs_enough_values_and_is_clamped() -> None:
    assert sketch.quantile({}, 0.5, 1) is None
    assert set(sketch.with_figures({}, [1e-300, 1e300])) == {-sketch.INDEX_MAX, sketch.INDEX_MAX}
