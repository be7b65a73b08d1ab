"""Whether a newcomer may go past those who wait, and in which band one waits."""

import pytest

from forebay.core.admission import AGE_S, Band, Ticket, WaitingRoom

SYSTEM, INTERACTIVE, DEFAULT, BATCH = Band


@pytest.mark.parametrize("front", [False, True])
@pytest.mark.parametrize("waits", Band)
def test_only_those_of_the_same_band_and_above_are_ahead_of_a_newcomer(waits: Band, front: bool) -> None:
    waiting: WaitingRoom[str] = WaitingRoom(10, 1000.0)
    enter = waiting.enter_again if front else waiting.enter
    enter("a", Ticket(waits), 0.0)
    assert [waiting.ahead(band) for band in Band] == [band >= waits for band in Band]
    waiting.leave("a")
    assert not any(waiting.ahead(band) for band in Band)


def test_who_has_waited_long_waits_in_the_band_above() -> None:
    waiting: WaitingRoom[str] = WaitingRoom(10, 1000.0)
    waiting.enter("a", Ticket(BATCH), 0.0)
    assert waiting.band("a") == BATCH
    waiting.expire(AGE_S[BATCH])
    assert waiting.band("a") == DEFAULT
    assert waiting.ahead(DEFAULT)
