"""The store of the scaler: concurrent writers, failed writes, and nothing written twice."""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from pathlib import Path

import pytest
from tests.control.deploying.rig import inline
from tests.control.deploying.world import wait

from forebay.control.scaling.state import ScalingState, Setting
from forebay.control.scaling.storing import ScalingStore
from forebay.sim.loop import run
from forebay.store import events
from forebay.store.database import Store, StoreDown, open_store
from forebay.store.documents import Changed, Documents, Kept
from forebay.store.schema import SCALES

CHANGE = Changed("scale.set", 1.0, "ann", "model/chat", "")


def run_with_store(folder: Path, test: Callable[[Store, list[str]], Awaitable[None]]) -> None:
    """Run a test with a store and the list of its notes, on virtual time."""
    store, noted = open_store(f"sqlite:///{folder / 'store.db'}"), list[str]()

    async def story() -> None:
        await test(store, noted)

    try:
        run(story(), seconds_max=1000.0)
    finally:
        store.close()


def scaled(replicas: int) -> ScalingState:
    it = ScalingState("chat")
    it.setting = Setting(replicas=replicas)
    it.changed.append(CHANGE)
    return it


def count(store: Store) -> int:
    with store.read() as connection:
        return sum(1 for _ in events.since(connection))


def test_a_conflicting_write_is_based_on_the_newer_version(tmp_path: Path) -> None:
    async def test(store: Store, noted: list[str]) -> None:
        books = [
            ScalingStore(Documents(SCALES, lambda: store, "test"), inline, lambda kind, why: None) for _ in range(2)
        ]
        first, second = scaled(1), scaled(2)
        await books[0].keep(first)
        await books[1].keep(second)
        assert (second.version, len(second.changed)) == (1, 1)
        await books[1].keep(second)
        assert (second.version, len(second.changed), count(store)) == (2, 0, 2)
        assert (await books[0].known())["chat"] == Kept(second.text(), 2)
        for book in books:
            book.close()

    run_with_store(tmp_path, test)


class FailingDocuments(Documents):
    """Raises these errors in turn, then works."""

    def __init__(self, store: Store, *errors: Exception) -> None:
        super().__init__(SCALES, lambda: store, "test")
        self.errors = list(errors)

    def keep(self, name: str, kept: Kept, at: float, changed: Sequence[Changed] = ()) -> Kept:
        if self.errors:
            raise self.errors.pop(0)
        return super().keep(name, kept, at, changed)


@pytest.mark.parametrize(
    ("error", "noted_then"),
    [(StoreDown("gone"), "gone; scaling goes on in memory"), (ValueError("odd"), "scaling: ValueError: odd")],
)
def test_failed_write_is_retried_later(tmp_path: Path, error: Exception, noted_then: str) -> None:
    async def test(store: Store, noted: list[str]) -> None:
        book = ScalingStore(FailingDocuments(store, error), inline, lambda kind, why: noted.append(why))
        it = scaled(1)
        task = asyncio.get_running_loop().create_task(book.follow(lambda: (it,), lambda stored: None))
        book.hurry()
        await wait(10.0)
        assert (noted, it.version, len(it.changed), count(store), book.trouble) == ([noted_then], 1, 0, 1, "")
        await wait(100.0)
        assert it.version > 1
        assert count(store) == 1
        task.cancel()
        with suppress(asyncio.CancelledError):
            await task

    run_with_store(tmp_path, test)


def test_unusable_recall_file_is_ignored(tmp_path: Path) -> None:
    async def test(store: Store, noted: list[str]) -> None:
        file = tmp_path / "no" / "scaled.json"
        book = ScalingStore(Documents(SCALES, lambda: store, "test"), inline, lambda kind, why: None, file)
        assert book.recalled() is None
        await book.keep(scaled(1))
        assert book.recalled() is None
        file.parent.mkdir()
        file.write_text("no json")
        assert book.recalled() is None
        it = scaled(2)
        it.version = 1
        await book.keep(it)
        assert book.recalled() == {"chat": Kept(it.text())}

    run_with_store(tmp_path, test)
