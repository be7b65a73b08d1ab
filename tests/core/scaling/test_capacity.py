"""The capacity of replicas, learned from the share of late answers at each load."""

import math
from itertools import pairwise
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from forebay.core.scaling.capacity import (
    CELL_WEIGHT_MAX,
    CELLS_MAX,
    EDGE,
    REACH,
    STEP,
    WEIGHT_MIN,
    Capacity,
    Cell,
    fit,
    gather,
    room,
    unloaded,
    with_responses,
)


def shown(rate: float, free: float, loads: tuple[float, ...], sizes: tuple[int, ...]) -> tuple[Cell, ...]:
    """Replicas that carry `rate` (n - `free` √n), and what is seen of them at shares of that."""
    cells: tuple[Cell, ...] = ()
    for replicas in sizes:
        for load in loads:
            per_replica = load * rate * room(replicas, free) / replicas
            strain = 0.1 if load < 0.99 else 3.0 * load
            cells = with_responses(cells, replicas, per_replica, 300, strain)
    return cells


@pytest.mark.parametrize("free", [0.3, 0.6, 0.9])
def test_true_capacity_is_found(free: float) -> None:
    loads = tuple(0.5 + 0.06 * step for step in range(16))

    found = fit(shown(100.0, free, loads, (1, 2, 4, 8, 12)))

    assert found.known
    for replicas in (2, 6, 12):
        assert found.of(replicas) == pytest.approx(100 * room(replicas, free), rel=0.12)


def test_capacity_exceeds_an_easily_served_load() -> None:
    found = fit(shown(100.0, 0.6, (0.3, 0.5), (4,)))

    assert not found.known
    assert found.of(4) == pytest.approx(0.5 * 100 * room(4, 0.6) * (1 + REACH), rel=0.1)


def test_capacity_is_below_the_lowest_load_if_all_were_overloads() -> None:
    found = fit(with_responses((), 4, 10.0, 1000, 8.0))

    assert found.known
    assert 5 <= found.of(4) / 4 < 10


def flat(strain: float, times: float, answers: float = 400, *more: float) -> tuple[Cell, ...]:
    """Of four replicas: so much strain from load 100 to so many times of it, and another one at each load above."""
    cells: tuple[Cell, ...] = ()
    for step in range(round(math.log(times) / STEP) + 1):
        cells = with_responses(cells, 4, 100 * math.exp(step * STEP), answers, strain)
    for step, each in enumerate(more, 1):
        cells = with_responses(cells, 4, 100 * times * math.exp(step * STEP), answers, each)
    return cells


def test_load_independent_lateness_does_not_reduce_capacity() -> None:
    clean, odd = flat(0.0, 2.0, 400, 0.0, 3.0, 6.0), flat(2.0, 2.0, 400, 2.0, 5.0, 8.0)

    assert (unloaded(clean), unloaded(odd)) == (0.0, pytest.approx(2.0))
    assert fit(odd, anyway=unloaded(odd)) == pytest.approx(fit(clean))
    assert fit(clean).known


@pytest.mark.parametrize(
    "cells",
    [
        flat(EDGE, 3.0),  # the promise is kept
        flat(100.0, 3.0),  # all loads were far too much
        flat(2.0, 1.4),  # too alike to say what load does
        flat(2.0, 3.0, 20),  # too few answers
        tuple(cell._replace(strain=2.0 * 1.06**at) for at, cell in enumerate(flat(2.0, 3.0))),  # it comes of the load
        (),
    ],
)
def test_strain_that_may_be_caused_by_load_is_not_load_independent(cells: tuple[Cell, ...]) -> None:
    assert unloaded(cells) == 0


@pytest.mark.parametrize("seed", range(8))
def test_load_independent_strain_is_found_in_noise(seed: int) -> None:
    rng, share = Random(seed), 0.03
    cells: tuple[Cell, ...] = ()
    for _ in range(300):
        late = sum(rng.random() < share for _ in range(100))
        cells = with_responses(cells, rng.randrange(8, 18), 20_000 / rng.uniform(8, 18), 100, late)

    assert unloaded(cells) == pytest.approx(100 * share, rel=0.25)


def test_capacity_is_the_geometric_mean_of_served_and_overloading_loads() -> None:
    cells = with_responses(with_responses((), 4, 10.0, 1000, 0.0), 4, 11.0, 1000, 9.0)

    assert fit(cells).of(4) / 4 == pytest.approx(math.sqrt(110), rel=0.05)


@pytest.mark.parametrize("seed", range(4))
def test_capacity_is_continuous_in_the_strain_limit(seed: int) -> None:
    """Bursts make answers late at any load: the strain rises slowly, and by chance it falls in between."""
    rng = Random(seed)
    cells: tuple[Cell, ...] = ()
    for step in range(40):
        cells = with_responses(cells, 30, 3000 * 1.06**step, 500, 0.4 * 1.06**step * rng.uniform(0.3, 1.7))

    rates = [fit(cells, 0.5 * 1.02**step, (0.6,)).rate for step in range(80)]

    assert rates == sorted(rates)
    assert max(after / before for before, after in pairwise(rates)) < 1.2
    assert rates[-1] > 3 * rates[0]


def test_few_answers_give_no_estimate() -> None:
    assert fit(()) == Capacity()
    assert fit(with_responses((), 4, 10.0, WEIGHT_MIN - 1, 0.0)).rate == 0


def test_few_late_answers_by_chance_do_not_set_the_capacity() -> None:
    cells = with_responses(with_responses((), 4, 10.0, 20, 5.0), 4, 12.0, 4000, 0.1)

    assert not fit(cells).known


def test_full_cell_forgets_as_many_responses_as_it_gets() -> None:
    cells = with_responses((), 1, 1.0, CELL_WEIGHT_MAX, 10.0)
    for _ in range(5):
        cells = with_responses(cells, 1, 1.0, CELL_WEIGHT_MAX / 2, 0.0)

    assert cells == (Cell(1, 0, CELL_WEIGHT_MAX, 0.3125),)
    assert with_responses(cells, 1, 1.0, 2 * CELL_WEIGHT_MAX, 7.0)[0].strain == 7.0


def test_cells_are_bounded_and_in_order() -> None:
    rng = Random(1)
    cells: tuple[Cell, ...] = ()
    for _ in range(2 * CELLS_MAX):
        cells = with_responses(cells, rng.randrange(1, 40), rng.uniform(1, 1000), rng.randrange(1, 90), 0.5)

    assert len(cells) == CELLS_MAX
    assert all(one[:2] < other[:2] for one, other in pairwise(cells))


def test_large_replica_counts_are_grouped() -> None:
    groups = [gather(replicas) for replicas in range(1, 1001)]

    assert groups[:12] == list(range(1, 13))
    assert groups == sorted(groups)
    assert all(abs(group / replicas - 1) < 0.1 for replicas, group in enumerate(groups, 1))
    assert len(set(groups)) < 70


@settings(max_examples=50)
@given(st.floats(0.1, 1e4), st.sampled_from((0.3, 0.6, 0.9)), st.floats(0.0, 1e6), st.floats(1.0, 3.0))
def test_need_is_the_fewest_sufficient_replicas_and_monotonic(
    rate: float, free: float, work: float, more: float
) -> None:
    able = Capacity(rate, free, True)
    need = able.need(work)

    assert able.of(need) >= work * (1 - 1e-6)
    assert need == 1 or able.of(need - 1) < work * (1 + 1e-6)
    assert able.need(work * more) >= need
