"""The event log: ordered, complete, and tamper-evident."""

from concurrent.futures import ThreadPoolExecutor

import pytest
from msgspec.structs import asdict
from sqlalchemy import delete, insert, update

from forebay.store import events
from forebay.store.database import Conflict, Store
from forebay.store.schema import EVENTS, HEAD


def write(store: Store, subject: str, why: str = "", document: object = None, cluster: str = "") -> events.Event:
    with store.write() as connection:
        return events.append(
            connection,
            at=12.125,
            actor="ann",
            kind="added",
            subject=subject,
            why=why,
            document=document,
            cluster=cluster,
        )


def test_events_are_read_back_in_order(store: Store) -> None:
    written = [
        write(store, f"model/{n % 3}", why=f"wh\u00ffy {n}", document={"n": n, "x": [1.5, None]}) for n in range(7)
    ]
    with store.read() as connection:
        assert list(events.since(connection)) == written
        assert list(events.since(connection, 5)) == written[5:]
        assert list(events.since(connection, subject="model/1")) == [written[1], written[4]]
        assert events.verify(connection) is None
    assert [event.number for event in written] == list(range(1, 8))
    assert written[0].document == '{"n":0,"x":[1.5,null]}'


def test_subject_filter_matches_whole_path_components(store: Store) -> None:
    for subject in ("model/a", "model/a/r-1", "model/ab", "model/a%", "model/a_/x"):
        write(store, subject)
    with store.read() as connection:
        found = [event.subject for event in events.since(connection, subject="model/a")]
        assert found == ["model/a", "model/a/r-1"]
        assert [event.subject for event in events.since(connection, subject="model/a_")] == ["model/a_/x"]


def test_cluster_filter_includes_shared_events(store: Store) -> None:
    for cluster in ("a", "", "b", "a"):
        write(store, "model/chat", cluster=cluster)
    with store.read() as connection:
        assert [event.number for event in events.since(connection, cluster="a")] == [1, 2, 4]
        assert [event.number for event in events.since(connection, 1, subject="model", cluster="b")] == [2, 3]
        assert [event.cluster for event in events.since(connection)] == ["a", "", "b", "a"]
        assert events.verify(connection) is None


@pytest.mark.parametrize(("was", "told"), [("a", ""), ("", "a"), ("a", "b")])
def test_verify_detects_an_event_moved_to_another_cluster(store: Store, was: str, told: str) -> None:
    write(store, "model/chat", cluster=was)
    with store.write() as connection:
        connection.execute(update(EVENTS).values(cluster=told))
    with store.read() as connection:
        assert "event 1 was changed" in str(events.verify(connection))


def test_events_are_read_across_pages(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(events, "PAGE", 3)
    for _ in range(10):
        write(store, "x")
    with store.read() as connection:
        assert [event.number for event in events.since(connection)] == list(range(1, 11))


def test_event_of_a_rolled_back_transaction_is_discarded(store: Store) -> None:
    write(store, "kept")

    def twice() -> None:
        with store.write() as connection:
            event = events.append(connection, at=1.0, actor="ann", kind="k", subject="lost")
            connection.execute(insert(EVENTS).values(asdict(event)))

    with pytest.raises(Conflict):
        twice()
    assert write(store, "kept too").number == 2
    with store.read() as connection:
        assert events.verify(connection) is None


def test_concurrent_writers_form_one_chain(store: Store) -> None:
    with ThreadPoolExecutor(8) as pool:
        numbers = list(pool.map(lambda n: write(store, f"s{n}").number, range(40)))
    assert sorted(numbers) == list(range(1, 41))
    with store.read() as connection:
        assert events.verify(connection) is None


CHANGES = {
    "at": 12.5,
    "actor": "bob",
    "kind": "added2",
    "subject": "model/2",
    "why": "else",
    "document": '{"n":2}',
    "previous": "1" * 64,
    "digest": "2" * 64,
    "number": 99,
    "cluster": "other",
}


@pytest.mark.parametrize("field", CHANGES)
def test_verify_names_a_changed_event(store: Store, field: str) -> None:
    for n in range(4):
        write(store, "model/1", why="because", document={"n": n})
    with store.write() as connection:
        connection.execute(update(EVENTS).where(EVENTS.c.number == 2).values({field: CHANGES[field]}))
    with store.read() as connection:
        assert "event 2" in str(events.verify(connection))


@pytest.mark.parametrize(("number", "said"), [(1, "event 1 is missing"), (4, "the last event is 3, but 4 were")])
def test_verify_detects_a_removed_event(store: Store, number: int, said: str) -> None:
    for _ in range(4):
        write(store, "model/1")
    with store.write() as connection:
        connection.execute(delete(EVENTS).where(EVENTS.c.number == number))
    with store.read() as connection:
        assert said in str(events.verify(connection))


def test_verify_detects_an_emptied_log(store: Store) -> None:
    write(store, "x")
    with store.write() as connection:
        connection.execute(delete(EVENTS))
        connection.execute(update(HEAD).values(number=5))
    with store.read() as connection:
        assert "5 were written" in str(events.verify(connection))
