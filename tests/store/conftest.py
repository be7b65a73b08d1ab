"""Stores of both kinds. A real PostgreSQL is started once, for tests that are left to `make test`."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.store.postgres import Postgres, serving

from forebay.store.database import Store, open_store


@pytest.fixture(scope="session")
def postgres() -> Iterator[Postgres]:
    with serving() as server:
        yield server


@pytest.fixture(params=["sqlite", pytest.param("postgres", marks=pytest.mark.slow)])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """An address at which there is no schema yet."""
    if request.param == "sqlite":
        return f"sqlite:///{tmp_path / 'store' / 'forebay.db'}"
    server: Postgres = request.getfixturevalue("postgres")
    return server.make(tmp_path.name)


@pytest.fixture
def store(url: str) -> Iterator[Store]:
    opened = open_store(url)
    yield opened
    opened.close()
