"""Opening a store: made, brought up to date, refused with a reason; transactions keep all or nothing."""

import sqlite3
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from alembic.autogenerate import compare_metadata
from alembic.migration import MigrationContext
from sqlalchemy import insert, select, text
from tests.store.postgres import Postgres

from forebay.store import events
from forebay.store.database import Conflict, Store, StoreDown, StoreError, open_store
from forebay.store.migrations import HEAD, REVISIONS
from forebay.store.schema import ALIASES, METADATA

ALIAS = {"model": "m", "alias": "champion", "revision": "r-1", "changed_at": 1.0, "changed_by": "ann"}


def test_migrations_make_the_tables_that_the_code_uses(store: Store) -> None:
    with store.read() as connection:
        assert compare_metadata(MigrationContext.configure(connection), METADATA) == []


def test_every_migration_is_known_in_its_order() -> None:
    from alembic.config import Config
    from alembic.script import ScriptDirectory

    import forebay.store.migrations

    config = Config()
    config.set_main_option("script_location", str(Path(forebay.store.migrations.__file__).parent))
    found = [each.revision for each in ScriptDirectory.from_config(config).walk_revisions()]
    assert tuple(reversed(found)) == REVISIONS


def test_a_store_that_is_opened_again_has_what_it_had(url: str) -> None:
    first = open_store(url)
    with first.write() as connection:
        connection.execute(insert(ALIASES).values(ALIAS))
    first.close()
    again = open_store(url)
    with again.read() as connection:
        assert connection.execute(select(ALIASES)).mappings().all() == [ALIAS]
    again.close()


def test_many_may_open_a_new_store_at_once(url: str) -> None:
    with ThreadPoolExecutor(6) as pool:
        stores = list(pool.map(open_store, [url] * 6))
    for store in stores:
        with store.write() as connection:
            events.append(connection, at=1.0, actor="a", kind="k", subject="s")
        store.close()


def test_a_store_of_a_newer_version_is_left_alone(url: str) -> None:
    store = open_store(url)
    with store.write() as connection:
        connection.execute(text("UPDATE alembic_version SET version_num = '9999'"))
    store.close()
    with pytest.raises(StoreError, match=r"schema 9999.*newer"):
        open_store(url)


def test_what_is_there_already_is_a_conflict_and_changes_nothing(store: Store) -> None:
    with store.write() as connection:
        connection.execute(insert(ALIASES).values(ALIAS))
    with pytest.raises(Conflict), store.write() as connection:
        connection.execute(insert(ALIASES), [{**ALIAS, "alias": "other"}, ALIAS])
    with store.read() as connection:
        assert [row.alias for row in connection.execute(select(ALIASES))] == ["champion"]


def test_one_who_reads_sees_one_state(store: Store) -> None:
    with store.read() as reader:
        assert reader.execute(select(ALIASES)).all() == []
        with store.write() as writer:
            writer.execute(insert(ALIASES).values(ALIAS))
        assert reader.execute(select(ALIASES)).all() == []
    with store.read() as reader:
        assert len(reader.execute(select(ALIASES)).all()) == 1


@pytest.mark.parametrize(
    ("url", "said"),
    [
        ("", "not a URL"),
        ("what?", "not a URL"),
        ("mysql://a@b/c", "mysql: not a kind of store"),
        ("sqlite://", "names no file"),
        ("sqlite:///:memory:", "names no file"),
        ("sqlite:////proc/nowhere/x.db", "cannot be written"),
    ],
)
def test_what_is_no_store_is_refused_with_what_would_be_one(url: str, said: str) -> None:
    with pytest.raises(StoreError, match=said):
        open_store(url)


def test_a_file_that_is_no_database_is_named(tmp_path: Path) -> None:
    path = tmp_path / "notes.txt"
    path.write_text("not a database, " * 100)
    with pytest.raises(StoreError, match=r"notes\.txt.*not a database"):
        open_store(f"sqlite:///{path}")


def test_nobody_else_may_read_the_file(tmp_path: Path) -> None:
    open_store(f"sqlite:///{tmp_path}/a.db").close()
    assert (tmp_path / "a.db").stat().st_mode & 0o777 == 0o600


def test_a_server_that_is_not_there_is_down_and_its_password_is_not_told() -> None:
    with pytest.raises(StoreDown) as caught:
        open_store("postgresql://forebay:secret@127.0.0.1:1/forebay")
    assert "127.0.0.1:1" in str(caught.value)
    assert "secret" not in str(caught.value)
    assert "secret" not in repr(caught.value.__cause__)


def test_a_lock_that_somebody_holds_too_long_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("forebay.store.database.LOCK_TIMEOUT_S", 0.05)
    store = open_store(f"sqlite:///{tmp_path}/a.db")
    other = sqlite3.connect(tmp_path / "a.db", isolation_level=None)
    other.execute("BEGIN IMMEDIATE")
    with pytest.raises(StoreDown, match="locked"), store.write():
        pass
    other.execute("ROLLBACK")
    with store.write() as connection:
        events.append(connection, at=1.0, actor="a", kind="k", subject="s")
    store.close()


KILLED = """
import os, signal, sys
from forebay.store import events
from forebay.store.database import open_store
store = open_store(sys.argv[1])
for n in range(1000):
    with store.write() as connection:
        events.append(connection, at=1.0, actor="a", kind="k", subject=str(n))
        if n == 20:
            os.kill(os.getpid(), signal.SIGKILL)
    print(n, flush=True)
"""


@pytest.mark.slow
def test_what_was_kept_outlives_a_process_that_is_killed(url: str) -> None:
    done = subprocess.run(
        [sys.executable, "-c", KILLED, url], capture_output=True, text=True, check=False, timeout=60
    )
    assert done.returncode < 0
    assert done.stdout.split() == [str(n) for n in range(20)]
    store = open_store(url)
    with store.write() as connection:
        assert events.append(connection, at=1.0, actor="a", kind="k", subject="next").number == 21
        assert events.verify(connection) is None
    store.close()


@pytest.mark.slow
def test_a_server_that_is_killed_and_comes_back_is_used_again(postgres: Postgres) -> None:
    store = open_store(postgres.make("killed"))
    with store.write() as connection:
        events.append(connection, at=1.0, actor="a", kind="k", subject="before")
    postgres.kill()
    with pytest.raises(StoreDown), store.write() as connection:
        events.append(connection, at=1.0, actor="a", kind="k", subject="while")
    postgres.start()
    with store.write() as connection:
        assert events.append(connection, at=1.0, actor="a", kind="k", subject="after").number == 2
        assert events.verify(connection) is None
    store.close()


def test_the_newest_schema_is_the_last_one() -> None:
    assert REVISIONS[-1] == HEAD
    assert sorted(REVISIONS) == list(REVISIONS)
