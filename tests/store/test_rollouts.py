"""Targets and rollouts in the store: they round-trip, and concurrent changes are conflicts."""

import hashlib
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from sqlalchemy import column, insert, select, table, text, update

from forebay.core.deploy.counting import Counted, Cursor
from forebay.core.deploy.course import COURSES, Kind
from forebay.core.deploy.rollout import Phase, Rollout
from forebay.core.deploy.slots import Held
from forebay.core.rollout import Arm, Observation, Rate, Rules, Score, State, Time, begin, effects, judge, observe
from forebay.store import events
from forebay.store.database import Conflict, Store, StoreError, open_store
from forebay.store.rollouts import RolloutEvent, Rollouts, Row, Target, replay
from forebay.store.schema import ALIASES, EVENTS, HEAD, ROLLOUTS

RULES = Rules((Score("quality", paired=True), Rate("errors"), Time("ttft", both_ways=True), Score("grade")), 0.1)
NOW = RolloutEvent("rollout.started", 5.0, "ann", "why not")


def row(model: str = "chat", **changes: Any) -> Row:
    rollout = Rollout("", model, "r-old", "r-new", COURSES[Kind.CANARY], since=5.0)
    return Row(
        replace(rollout, **changes),
        RULES,
        Counted(begin(RULES)),
        Held((0, 1), (3,)),
        created_at=5.0,
        created_by="ann",
    )


@pytest.fixture
def rollouts(store: Store) -> Rollouts:
    return Rollouts(lambda: store, "test")


def written(store: Store) -> list[str]:
    with store.read() as connection:
        assert events.verify(connection) is None
        return [event.kind for event in events.since(connection)]


def test_rollouts_are_numbered_and_round_trip(store: Store, rollouts: Rollouts) -> None:
    first = rollouts.begin(row(), NOW)
    assert first.rollout.id == "chat:1"
    assert rollouts.known().rollouts == (first,)
    assert rollouts.begin(row("embed"), NOW).rollout.id == "embed:1"
    ended = replace(first, rollout=replace(first.rollout, phase=Phase.PROMOTED))
    target = Target("chat", "r-new", "r-old", (3,), 6.0, "ann", "it is better")
    after = rollouts.change(ended, [RolloutEvent("rollout.promoted", 6.0, "control")], target)
    assert after.version == 2
    second = rollouts.begin(row(), NOW)
    assert second.rollout.id == "chat:2"
    known = rollouts.known()
    assert known.targets == (target,)
    assert [(each.rollout.id, each.ended) for each in known.rollouts] == [("chat:2", False), ("embed:1", False)]
    assert [each.rollout.id for each in rollouts.past("chat")] == ["chat:2", "chat:1"]
    assert rollouts.past("chat")[1] == after
    assert len(rollouts.past(None, 2)) == 2
    assert written(store) == ["rollout.started", "rollout.started", "rollout.promoted", "rollout.started"]
    with store.read() as connection:
        targets, replayed = replay(events.since(connection))
    assert targets == {"chat": target}
    assert replayed == {each.rollout.id: (each.rollout, each.held) for each in rollouts.past()}


def test_second_rollout_of_a_model_is_a_conflict(store: Store, rollouts: Rollouts) -> None:
    rollouts.begin(row(), NOW)
    with pytest.raises(Conflict, match="chat:1 of chat is under way"):
        rollouts.begin(row(), NOW)
    assert written(store) == ["rollout.started"]


def test_change_based_on_an_old_version_is_a_conflict(store: Store, rollouts: Rollouts) -> None:
    first = rollouts.begin(row(), NOW)
    rollouts.change(replace(first, held=Held((0, 1), (3, 4))), [])
    target = Target("chat", "r-new", "r-old", (3,), 6.0, "ann")
    with pytest.raises(Conflict, match="chat:1 was changed concurrently"):
        rollouts.change(replace(first, held=Held((0,))), [NOW], target)
    known = rollouts.known()
    assert known.targets == ()
    assert known.rollouts[0].held == Held((0, 1), (3, 4))
    assert written(store) == ["rollout.started"]


def test_clusters_sharing_a_store_are_isolated(store: Store, rollouts: Rollouts) -> None:
    rollouts.begin(row(), NOW)
    other = Rollouts(lambda: store, "other")
    assert other.known() == other.known().__class__()
    assert other.begin(row(), NOW).rollout.id == "chat:1"
    other.point(Target("chat", "r-new", "r-old", (0,), 6.0, "ann"), RolloutEvent("target.set", 6.0, "ann"))
    assert rollouts.known().targets == ()
    assert len(other.known().targets) == 1
    with store.read() as connection:
        own, others = (replay(events.since(connection, cluster=each)) for each in ("test", "other"))
    assert (list(own[0]), list(own[1])) == ([], ["chat:1"])
    assert (list(others[0]), list(others[1])) == (["chat"], ["chat:1"])


def test_reading_does_not_create_a_missing_store(tmp_path: Path) -> None:
    path = tmp_path / "a.db"
    rollouts = Rollouts(lambda: open_store(f"sqlite:///{path}"), "test", path.exists)
    assert (rollouts.known().rollouts, rollouts.past()) == ((), ())
    assert not path.exists()
    rollouts.begin(row(), NOW)
    assert path.exists()
    assert len(rollouts.known().rollouts) == 1
    rollouts.close()
    rollouts.close()
    assert len(rollouts.past()) == 1
    rollouts.close()


@pytest.mark.parametrize(
    ("column", "value", "said"),
    [
        ("document", '{"id": "chat:1"}', "rollout chat:1 cannot be read"),
        ("document", "", "rollout chat:1 cannot be read"),
        ("evidence", '{"state": null}', "rollout chat:1: its evidence"),
        ("indices", '{"stable": ["a"]}', "rollout chat:1: its slots"),
        ("rules", "[]", "rollout chat:1: its rules"),
        (
            "rules",
            '{"order":["x"],"rates":[],"times":[],"scores":[],"rollback_alpha":0.1,"promote_alpha":0.1}',
            "no metric 'x'",
        ),
    ],
)
def test_unreadable_document_is_named(store: Store, rollouts: Rollouts, column: str, value: str, said: str) -> None:
    rollouts.begin(row(), NOW)
    with store.write() as connection:
        connection.execute(update(ROLLOUTS).values({column: value}))
    with pytest.raises(StoreError, match=said):
        rollouts.known()


def test_unreadable_target_is_named(store: Store, rollouts: Rollouts) -> None:
    rollouts.point(Target("chat", "r-new", "r-old", (0,), 6.0, "ann"), RolloutEvent("target.set", 6.0, "ann"))
    with store.write() as connection:
        connection.execute(text("UPDATE targets SET indices = '[-'"))
    with pytest.raises(StoreError, match="target of chat: its slots"):
        rollouts.known()


FIGURES = st.one_of(st.floats(), st.floats(0, 1), st.sampled_from([0.0, 1.0, 1e308, 5e-324]))
BATCHES = st.lists(
    st.lists(
        st.builds(
            Observation,
            st.sampled_from(["quality", "errors", "ttft", "grade", "other"]),
            st.sampled_from(Arm),
            FIGURES,
            st.sampled_from(["", "256", "1024"]),
        ),
        max_size=40,
    ),
    max_size=8,
)


@settings(max_examples=60, deadline=None)
@given(BATCHES)
def test_evidence_round_trips(batches: list[list[Observation]]) -> None:
    from forebay.store.rollouts import _read, _text

    state: State = begin(RULES)
    for batch in batches:
        state = observe(RULES, state, batch)
    counted = Counted(state, {"gateway-0": Cursor("i", 3)}, 17)
    assert _read(_text(counted), Counted, "it") == counted
    assert str(judge(RULES, _read(_text(counted), Counted, "it").state)) == str(judge(RULES, state))
    assert str(effects(RULES, state)) == str(effects(RULES, _read(_text(counted), Counted, "it").state))


@pytest.mark.parametrize("version", ["0001", "0003"])
def test_older_store_is_migrated_with_its_data(url: str, monkeypatch: pytest.MonkeyPatch, version: str) -> None:
    from forebay.store import migrations

    alias = {"model": "m", "alias": "champion", "revision": "r-1", "changed_at": 1.0, "changed_by": "ann"}
    newest = migrations.HEAD
    with monkeypatch.context() as before:
        before.setattr(migrations, "HEAD", version)
        before.setattr(migrations.upgrade, "__defaults__", (version,))
        old = open_store(url)
        with old.write() as connection:
            connection.execute(insert(ALIASES).values(alias))
            event = [1, 1.0, "ann", "alias.set", "model/m/r-1", "", "{}", events.FIRST]
            digest = hashlib.sha256(json.dumps(event, separators=(",", ":")).encode()).hexdigest()
            named = dict(zip(EVENTS.c.keys(), [*event, digest], strict=False))
            connection.execute(insert(table("events", *map(column, named))).values(named))
            connection.execute(update(HEAD).values(number=1, digest=digest))
        old.close()
    store = open_store(url)
    with store.read() as connection:
        assert connection.execute(text("SELECT version_num FROM alembic_version")).scalar() == newest
        assert connection.execute(select(ALIASES)).mappings().all() == [alias]
        assert events.verify(connection) is None
    assert Rollouts(lambda: store, "test").begin(row(), NOW).rollout.id == "chat:1"
    store.close()
