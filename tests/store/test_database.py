"""Opening a store: created, migrated, rejected with a reason; transactions are atomic."""

import sqlite3
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import psycopg
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


def test_migrations_match_the_schema(store: Store) -> None:
    with store.read() as connection:
        assert compare_metadata(MigrationContext.configure(connection), METADATA) == []


def test_revisions_lists_every_migration_in_order() -> None:
    from alembic.config import Config
    from alembic.script import ScriptDirectory

    import forebay.store.migrations

    config = Config()
    config.set_main_option("script_location", str(Path(forebay.store.migrations.__file__).parent))
    found = [each.revision for each in ScriptDirectory.from_config(config).walk_revisions()]
    assert tuple(reversed(found)) == REVISIONS


def test_reopened_store_keeps_its_data(url: str) -> None:
    first = open_store(url)
    with first.write() as connection:
        connection.execute(insert(ALIASES).values(ALIAS))
    first.close()
    again = open_store(url)
    with again.read() as connection:
        assert connection.execute(select(ALIASES)).mappings().all() == [ALIAS]
    again.close()


def test_new_store_can_be_opened_concurrently(url: str) -> None:
    with ThreadPoolExecutor(6) as pool:
        stores = list(pool.map(open_store, [url] * 6))
    for store in stores:
        with store.write() as connection:
            events.append(connection, at=1.0, actor="a", kind="k", subject="s")
        store.close()


def test_store_with_a_newer_schema_is_rejected(url: str) -> None:
    store = open_store(url)
    with store.write() as connection:
        connection.execute(text("UPDATE alembic_version SET version_num = '9999'"))
    store.close()
    with pytest.raises(StoreError, match=r"schema 9999.*newer"):
        open_store(url)


def test_duplicate_row_is_a_conflict_and_rolls_back(store: Store) -> None:
    with store.write() as connection:
        connection.execute(insert(ALIASES).values(ALIAS))
    with pytest.raises(Conflict), store.write() as connection:
        connection.execute(insert(ALIASES), [{**ALIAS, "alias": "other"}, ALIAS])
    with store.read() as connection:
        assert [row.alias for row in connection.execute(select(ALIASES))] == ["champion"]


def test_readers_have_snapshot_isolation(store: Store) -> None:
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
        ("sqlite://folder/x.db", "names no file"),
        ("postgresql://a@b:port/c", "not a URL"),
        ("sqlite:////proc/nowhere/x.db", "cannot be written"),
    ],
)
def test_invalid_store_url_is_rejected_with_a_hint(url: str, said: str) -> None:
    with pytest.raises(StoreError, match=said):
        open_store(url)


def test_file_that_is_no_database_is_named(tmp_path: Path) -> None:
    path = tmp_path / "notes.txt"
    path.write_text("not a database, " * 100)
    with pytest.raises(StoreError, match=r"notes\.txt.*not a database"):
        open_store(f"sqlite:///{path}")


def test_database_file_is_private(tmp_path: Path) -> None:
    open_store(f"sqlite:///{tmp_path}/a.db").close()
    assert (tmp_path / "a.db").stat().st_mode & 0o777 == 0o600


def test_unreachable_server_is_reported_without_the_password() -> None:
    with pytest.raises(StoreDown) as caught:
        open_store("postgresql://forebay:secret@127.0.0.1:1/forebay")
    assert "127.0.0.1:1" in str(caught.value)
    assert "secret" not in str(caught.value)
    assert "secret" not in repr(caught.value.__cause__)


def test_lock_timeout_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
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
def test_committed_data_survives_a_killed_process(url: str) -> None:
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
def test_store_reconnects_to_a_restarted_server(postgres: Postgres) -> None:
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


def test_head_is_the_last_revision() -> None:
    assert REVISIONS[-1] == HEAD
    assert sorted(REVISIONS) == list(REVISIONS)


@pytest.mark.slow
@pytest.mark.parametrize("encoding", ["SQL_ASCII", "LATIN1"])
def test_database_of_another_encoding_is_used_as_far_as_it_can_be(postgres: Postgres, encoding: str) -> None:
    with psycopg.connect(postgres.url("postgres"), autocommit=True) as connection:
        created = (
            f"CREATE DATABASE \"{encoding}\" ENCODING '{encoding}' LC_COLLATE 'C' LC_CTYPE 'C' TEMPLATE template0"
        )
        connection.execute(created.encode())
    open_store(postgres.url(encoding)).close()
    store = open_store(postgres.url(encoding))
    with store.write() as connection:
        events.append(connection, at=1.0, actor="ann", kind="k", subject="s", why="größer")
    with store.read() as connection:
        assert [each.why for each in events.since(connection)] == ["größer"]
    if encoding == "LATIN1":
        with pytest.raises(StoreError, match="has no equivalent"), store.write() as connection:
            events.append(connection, at=1.0, actor="ann", kind="k", subject="s", why="😀")
    store.close()
