"""Leadership: one leader at a time, each with its own epoch, and no writes by deposed leaders."""

import itertools
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress

import pytest
from sqlalchemy import insert, select, update
from tests.store.postgres import Postgres

from forebay.store.database import Conflict, Store, StoreDown, open_store
from forebay.store.leadership import Deposed, Guarded, Leader, Leadership
from forebay.store.schema import ALIASES, CONTROLLERS, LEADERS

Made = Callable[[str], Leadership]


NUMBERS = itertools.count()


@pytest.fixture(scope="module", params=["sqlite", pytest.param("postgres", marks=pytest.mark.slow)])
def store(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Store]:
    """One for all tests: each has a cluster of its own in it."""
    folder = tmp_path_factory.mktemp("leaders")
    if request.param == "sqlite":
        url = f"sqlite:///{folder}/forebay.db"
    else:
        server: Postgres = request.getfixturevalue("postgres")
        url = server.make(folder.name)
    opened = open_store(url)
    yield opened
    opened.close()


@pytest.fixture
def cluster() -> str:
    return f"c{next(NUMBERS)}"


@pytest.fixture
def made(store: Store, cluster: str) -> Made:
    return lambda name: Leadership(lambda: store, cluster, name, f"http://{name}", 60.0)


def end_lease(store: Store) -> None:
    """As if nothing had been renewed for a minute."""
    with store.write() as connection:
        connection.execute(update(LEADERS).values(renewed_at=LEADERS.c.renewed_at - 61.0))


def alias(cluster: str, name: str) -> dict[str, object]:
    return {"model": cluster, "alias": name, "revision": "r-1", "changed_at": 1.0, "changed_by": "ann"}


def aliases(store: Store, cluster: str) -> list[str]:
    """What was written."""
    with store.read() as connection:
        asked = select(ALIASES.c.alias).where(ALIASES.c.model == cluster).order_by(ALIASES.c.alias)
        return list(connection.execute(asked).scalars())


def test_first_applicant_leads_and_the_second_learns_the_leader(made: Made) -> None:
    a, b = made("a"), made("b")
    assert a.apply() == Leader(1, "a", "http://a", 60.0)
    told = b.apply()
    assert told[:3] == (1, "a", "http://a")
    assert 59.0 < told.left_s <= 60.0
    assert a.renew(1) == 1, "one waits"
    b.resign()
    assert a.renew(1) == 0


def test_expired_lease_is_taken_over_with_a_new_epoch(store: Store, made: Made) -> None:
    a, b = made("a"), made("b")
    a.apply()
    end_lease(store)
    assert b.apply().epoch == 2
    with pytest.raises(Deposed, match="b, epoch 2"):
        a.renew(1)
    a.resign()
    b.renew(2)
    end_lease(store)
    assert a.apply().epoch == 3


def test_expired_lease_can_be_renewed_if_not_taken_over(store: Store, made: Made) -> None:
    a, b = made("a"), made("b")
    a.apply()
    end_lease(store)
    a.renew(1)
    assert b.apply().holder == "a"


def test_resigned_lease_is_available_immediately(made: Made) -> None:
    a, b = made("a"), made("b")
    a.apply()
    b.apply()
    a.resign()
    with pytest.raises(Deposed, match="nobody"):
        a.renew(1)
    assert b.apply()[:2] == (2, "b")
    assert b.renew(2) == 0, "it waits no more"


def test_epoch_is_above_the_floor_and_strictly_increases(made: Made) -> None:
    a = made("a")
    assert a.apply(floor=7).epoch == 8
    assert a.apply(floor=3).epoch == 9, "who asks again begins anew"


def test_silent_applicants_are_forgotten(store: Store, made: Made, cluster: str) -> None:
    a, b = made("a"), made("b")
    a.apply()
    b.apply()
    with store.write() as connection:
        connection.execute(update(CONTROLLERS).values(seen_at=CONTROLLERS.c.seen_at - 61.0))
    assert a.renew(1) == 0
    with store.write() as connection:
        connection.execute(update(CONTROLLERS).values(seen_at=1.0))
    a.renew(1)
    with store.read() as connection:
        asked = select(CONTROLLERS).where(CONTROLLERS.c.cluster == cluster)
        assert connection.execute(asked).all() == []


def test_writes_of_a_deposed_leader_are_rejected(store: Store, made: Made, cluster: str) -> None:
    a, b = made("a"), made("b")
    guarded = Guarded(store, a, a.apply().epoch)
    with guarded.write() as connection:
        connection.execute(insert(ALIASES).values(alias(cluster, "first")))
    end_lease(store)
    with guarded.write() as connection:  # nobody has taken it: nobody is harmed
        connection.execute(insert(ALIASES).values(alias(cluster, "second")))
    b.apply()
    with pytest.raises(Deposed), guarded.write() as connection:
        connection.execute(insert(ALIASES).values(alias(cluster, "third")))
    assert aliases(store, cluster) == ["first", "second"]


def test_clusters_sharing_a_store_have_separate_leaders(store: Store, made: Made) -> None:
    made("a").apply()
    assert Leadership(lambda: store, "other", "b", "", 60.0).apply()[:2] == (1, "b")


def test_concurrent_applicants_elect_one_leader(store: Store, made: Made) -> None:
    def tried(name: str) -> Leader:
        while True:
            try:
                return made(name).apply()
            except Conflict:
                continue

    with ThreadPoolExecutor(6) as pool:
        told = list(pool.map(tried, "abcdef"))
    assert len({(each.epoch, each.holder) for each in told}) == 1


@pytest.mark.slow
def test_takeover_waits_for_a_write_in_progress(store: Store, made: Made, cluster: str) -> None:
    if store.name.startswith("sqlite"):
        pytest.skip("there only one writes at a time")
    a, b = made("a"), made("b")
    guarded = Guarded(store, a, a.apply().epoch)
    end_lease(store)
    with ThreadPoolExecutor(1) as pool:
        with guarded.write() as connection:
            connection.execute(insert(ALIASES).values(alias(cluster, "first")))
            taking = pool.submit(b.apply)
            with pytest.raises(TimeoutError):
                taking.result(0.3)
        assert taking.result(10).epoch == 2
    assert aliases(store, cluster) == ["first"]


@pytest.mark.slow
def test_leader_stopped_in_a_transaction_does_not_block_takeover(store: Store, cluster: str) -> None:
    if store.name.startswith("sqlite"):
        pytest.skip("there is only one control")
    a, b = (Leadership(lambda: store, cluster, name, "", 1.0) for name in "ab")
    guarded = Guarded(store, a, a.apply().epoch)
    end_lease(store)
    writing = guarded.write()
    connection = writing.__enter__()
    connection.execute(insert(ALIASES).values(alias(cluster, "first")))
    with ThreadPoolExecutor(1) as pool:

        def tried() -> Leader:
            while True:
                with suppress(StoreDown):
                    return b.apply()

        assert pool.submit(tried).result(20).holder == "b"
    with pytest.raises(Exception, match=r"terminat|closed"):
        writing.__exit__(None, None, None)
    assert aliases(store, cluster) == []
