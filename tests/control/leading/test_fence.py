"""The fence of a run folder: behind it nothing is started, stopped, observed, published or started late."""

import asyncio
import subprocess
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest
from tests.control.units import COMMANDS, kill_all, replica, seen, wait_for

from forebay.control.snapshot import SnapshotFile, Superseded
from forebay.core.model import Snapshot
from forebay.core.reconcile import Kind
from forebay.providers.fencing import CLAIM, Fence, Fenced, claim_as_void, claim_command, highest_epoch
from forebay.providers.local import Intent, LocalProvider


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Path]:
    yield tmp_path
    kill_all(tmp_path)


def fenced(folder: Path, epoch: int) -> LocalProvider:
    return LocalProvider(folder, COMMANDS, {}, fence=Fence(folder / "epochs", epoch))


def test_fence_only_rises_and_blocks_older_epochs(tmp_path: Path) -> None:
    old, new = Fence(tmp_path / "epochs", 5), Fence(tmp_path / "epochs", 9)
    assert highest_epoch(tmp_path / "epochs") == 0
    with pytest.raises(Fenced, match="epoch 0"):
        old.check()
    old.raise_up()
    old.check()
    new.raise_up()
    with pytest.raises(Fenced, match="epoch 9 leads"):
        old.check()
    with pytest.raises(Fenced):
        old.raise_up()
    new.check()
    assert highest_epoch(tmp_path / "epochs") == 9
    (tmp_path / "epochs" / "notes").touch()
    assert highest_epoch(tmp_path / "epochs") == 9


def test_unit_can_be_claimed_or_voided_only_once(tmp_path: Path) -> None:
    command = claim_command(tmp_path, ["/bin/echo", "it runs"])
    first = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (first.returncode, first.stdout) == (0, "it runs\n")
    assert (tmp_path / CLAIM).read_text().strip().isdigit()
    assert not claim_as_void(tmp_path)
    again = subprocess.run(command, capture_output=True, text=True, check=False)
    assert again.returncode != 0
    assert again.stdout == ""
    (tmp_path / CLAIM).unlink()
    assert claim_as_void(tmp_path)
    assert subprocess.run(command, capture_output=True, check=False).returncode != 0
    gone = claim_command(tmp_path / "gone", ["/bin/echo", "it runs"])
    assert subprocess.run(gone, capture_output=True, check=False).stdout == b""


def test_deposed_provider_is_fenced_and_the_new_one_adopts_units(folder: Path) -> None:
    async def main() -> None:
        old, new = fenced(folder, 1), fenced(folder, 2)
        Fence(folder / "epochs", 1).raise_up()
        await old.place(replica(), 1)
        unit = await wait_for(old, "chat-0", lambda u: u.endpoint)
        Fence(folder / "epochs", 2).raise_up()
        for act in (
            lambda: old.place(replica("chat-1"), 1),
            lambda: old.remove("chat-0", 1, 0.0),
            old.observe,
        ):
            with pytest.raises(Fenced):
                await act()
        adopted = await seen(new, "chat-0")
        assert adopted
        assert (adopted.pid, adopted.alive) == (unit.pid, True)
        old.close()
        new.close()

    asyncio.run(main())


def test_start_pending_at_takeover_never_runs(folder: Path) -> None:
    async def main() -> None:
        own = folder / "units" / "chat-0.g1"
        own.mkdir(parents=True)
        intent = Intent("chat-0", 1, Kind.REPLICA, "d1", 5.0)
        (own / "unit.json").write_bytes(msgspec.json.encode(intent))
        Fence(folder / "epochs", 2).raise_up()
        new = fenced(folder, 2)
        unit = await seen(new, "chat-0")
        assert unit
        assert not unit.alive
        late = subprocess.run(claim_command(own, ["/bin/echo", "it runs"]), capture_output=True, check=False)
        assert late.stdout == b""
        new.close()

    asyncio.run(main())


def test_snapshot_of_a_newer_epoch_is_not_overwritten(tmp_path: Path) -> None:
    path = tmp_path / "snapshot.json"
    old, new = SnapshotFile(path, 1), SnapshotFile(path, 2)
    assert old.write(())
    new.read()
    assert new.write(()), "another epoch is another snapshot"
    with pytest.raises(Superseded, match="epoch 2"):
        old.write(())
    assert not new.write(())
    path.write_bytes(msgspec.json.encode(Snapshot(99, (), epoch=1)))
    assert new.write(()), "what is older is written over"
    path.write_bytes(b"{")
    assert new.write(())
    assert msgspec.json.decode(path.read_bytes(), type=Snapshot).epoch == 2
    assert list(tmp_path.glob("*.new")) == []
