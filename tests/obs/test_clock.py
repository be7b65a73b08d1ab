"""The wall clock and identifiers, and how a simulation puts its own in their place."""

import time

import pytest

from forebay.obs.clock import new_id, random_hex, standing_in, wall_s


def test_dates_are_of_today_and_identifiers_never_come_twice() -> None:
    assert time.time() <= wall_s() <= time.time()  # noqa: TID251 - what it is compared with
    assert len({new_id("req") for _ in range(1000)}) == 1000
    assert len(random_hex(8)) == 16


def test_a_simulation_has_its_own_dates_and_identifiers_until_it_ends() -> None:
    def simulate() -> None:
        with standing_in(lambda: 12.5, lambda size: "ab" * size):
            assert (wall_s(), random_hex(2), new_id("x")) == (12.5, "abab", "x-" + "ab" * 12)
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        simulate()
    assert wall_s() > 1e9
    assert new_id("x") != new_id("x")
