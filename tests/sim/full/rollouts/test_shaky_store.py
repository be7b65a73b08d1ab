"""The simulator's store behaves like any other until a fault is injected."""

from pathlib import Path

import pytest
from sqlalchemy import Connection
from tests.store.test_events import (
    test_event_of_a_rolled_back_transaction_is_discarded,
    test_events_are_read_across_pages,
    test_events_are_read_back_in_order,
    test_subject_filter_matches_whole_path_components,
)

from forebay.sim.full.rollouts.store import ShakyStore
from forebay.store import events
from forebay.store.database import Conflict, StoreDown, open_store

__all__ = [
    "test_event_of_a_rolled_back_transaction_is_discarded",
    "test_events_are_read_across_pages",
    "test_events_are_read_back_in_order",
    "test_subject_filter_matches_whole_path_components",
]


@pytest.fixture
def written() -> list[str]:
    """A line for every transaction that was kept."""
    return []


@pytest.fixture
def store(tmp_path: Path, written: list[str]) -> ShakyStore:
    return ShakyStore(open_store(f"sqlite:///{tmp_path / 'store.db'}"), lambda: written.append("kept"))


def write(store: ShakyStore) -> None:
    with store.write() as connection:
        events.append(connection, at=1.0, actor="ann", kind="k", subject="s")


def count(connection: Connection) -> int:
    return len(list(events.since(connection)))


def kept(store: ShakyStore) -> int:
    with store.read() as connection:
        return count(connection)


def test_store_outage_fails_reads_and_writes_until_it_ends(store: ShakyStore, written: list[str]) -> None:
    store.down = True
    with pytest.raises(StoreDown):
        write(store)
    with pytest.raises(StoreDown):
        kept(store)
    store.down = False
    write(store)
    assert kept(store) == len(written) == 1


def test_conflicting_store_write_is_discarded(store: ShakyStore, written: list[str]) -> None:
    store.conflicts = 1
    with pytest.raises(Conflict):
        write(store)
    assert kept(store) == 0
    write(store)
    assert kept(store) == len(written) == 1


def test_store_write_with_a_lost_response_is_kept(store: ShakyStore, written: list[str]) -> None:
    store.answers_lost = 1
    with pytest.raises(StoreDown):
        write(store)
    assert kept(store) == len(written) == 1
