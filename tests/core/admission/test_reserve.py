"""Batch work leaves free what urgent requests need, learns how much that is, and takes everything when alone."""

import math
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from forebay.core.admission.reserve import QUIET_S, SHARE_FIRST, SHORT_ONCE_IN, Reserve

PLACES, ROOM = 64, 80


def after(found: list[bool], places: int = PLACES) -> Reserve:
    reserve = Reserve()
    for each in found:
        reserve.came(each, places, 0.0)
    return reserve


def test_batch_work_alone_has_all_the_room() -> None:
    assert Reserve().room(PLACES, ROOM, 0.0) == ROOM


@pytest.mark.parametrize(("places", "room"), [(1, 1), (2, 1), (8, 6), (64, 48)])
def test_a_share_is_left_free_as_soon_as_there_are_urgent_requests(places: int, room: int) -> None:
    reserve = Reserve()
    reserve.seen(5.0)
    assert reserve.room(places, 2 * places, 5.0) == room == max(1, places - math.ceil(SHARE_FIRST * places))


def test_the_room_is_given_back_when_nothing_urgent_has_come_for_a_while() -> None:
    reserve = after([True])
    assert reserve.room(PLACES, ROOM, QUIET_S - 1) < PLACES
    assert reserve.room(PLACES, ROOM, QUIET_S) == ROOM
    reserve.seen(QUIET_S)
    assert reserve.room(PLACES, ROOM, QUIET_S) < PLACES


def test_who_finds_no_place_makes_batch_work_leave_one_more() -> None:
    assert after([False] * 3).room(PLACES, ROOM, 0.0) == PLACES - PLACES * SHARE_FIRST - 3


@given(st.lists(st.booleans(), max_size=300), st.integers(1, 100), st.integers(1, 100))
def test_an_idle_replica_always_takes_batch_work_and_one_without_free_places_never_does(
    found: list[bool], places: int, places_elsewhere: int
) -> None:
    reserve = after(found, places_elsewhere)
    reserve.seen(0.0)
    assert 1 <= reserve.room(places, places + 2, 0.0) <= places


def test_where_all_find_a_place_nothing_is_left_free_in_the_end() -> None:
    assert after([True] * (SHORT_ONCE_IN * PLACES)).room(PLACES, ROOM, 0.0) == PLACES


def test_the_share_of_requests_that_find_no_place_becomes_what_it_should_be() -> None:
    rng, reserve, short = Random(1), Reserve(), 0
    for _ in range(200 * SHORT_ONCE_IN):
        needed = rng.expovariate(1 / 4)  # places that must be free for this one to find one
        found = needed < PLACES - reserve.room(PLACES, ROOM, 0.0)
        reserve.came(found, PLACES, 0.0)
        short += not found
    assert short == pytest.approx(200, rel=0.3)
