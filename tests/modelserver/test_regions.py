"""Shared memory regions of clients: invalid registrations, and regions that change while in use."""

import os
import resource
from pathlib import Path

import pytest

from forebay.core.serving.errors import Kind, Refused
from forebay.modelserver.process.segments import Staging, where
from forebay.modelserver.regions import REGIONS_MAX, SharedRegions
from forebay.wire.oip.ports import MemoryKind, Region


def region(name: str = "r", key: str = "/k", size: int = 32, offset: int = 16) -> Region:
    return Region(MemoryKind.SYSTEM, name, size, offset, key)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "k").write_bytes(bytes(range(64)))
    return tmp_path


def test_parts_of_a_region_are_read_and_written_in_place(folder: Path) -> None:
    regions = SharedRegions(str(folder))
    regions.register(region())
    assert bytes(regions.read("r", 4, 3)) == bytes([20, 21, 22])
    assert bytes(regions.read("r", 0, 32)) == bytes(range(16, 48))
    regions.target("r", 30, 2).put("OUT", b"ab")
    assert (folder / "k").read_bytes()[46:48] == b"ab"
    regions.target("r", 0, 2).put("OUT", b"")
    assert len((folder / "k").read_bytes()) == 64


@pytest.mark.parametrize(
    ("given", "kind", "text"),
    [
        (region(size=49), Kind.INVALID_ARGUMENT, "failed to register shared memory region 'r': invalid args"),
        (region(offset=2**63), Kind.INVALID_ARGUMENT, "failed to register shared memory region 'r': invalid args"),
        (region(size=0), Kind.INVALID_ARGUMENT, "failed to register shared memory region 'r': unable to process"),
        (region(key="/none"), Kind.INTERNAL, "Unable to open shared memory region: '/none'"),
        (region(key="/../k"), Kind.INTERNAL, "Unable to open shared memory region: '/../k'"),
        (region(key="a\0b"), Kind.INTERNAL, "Unable to open shared memory region"),
        (region(key=".."), Kind.INTERNAL, "Unable to open shared memory region: '..'"),
        (region(key="/pipe"), Kind.INTERNAL, "Unable to open shared memory region: '/pipe'"),
        (region(key="/link"), Kind.INTERNAL, "Unable to open shared memory region: '/link'"),
        (region(key="/folder"), Kind.INTERNAL, "Unable to open shared memory region: '/folder'"),
        (region(key="//"), Kind.INVALID_ARGUMENT, "cannot register shared memory region 'r' - invalid shm key '//'"),
        (
            region(key="/triton_python_backend_shm_region_1"),
            Kind.INVALID_ARGUMENT,
            "cannot register shared memory reg",
        ),
        (Region(MemoryKind.CUDA, "c", 8), Kind.UNSUPPORTED, "CUDA shared memory is not supported"),
    ],
    ids=lambda value: value.key if isinstance(value, Region) else "",
)
def test_invalid_region_is_rejected(folder: Path, given: Region, kind: Kind, text: str) -> None:
    os.mkfifo(folder / "pipe")
    (folder / "link").symlink_to(folder / "k")
    (folder / "folder").mkdir()
    regions = SharedRegions(str(folder))
    with pytest.raises(Refused) as refused:
        regions.register(given)
    assert refused.value.kind is kind
    assert refused.value.text.startswith(text)
    assert regions.status(MemoryKind.SYSTEM, "") == []


def test_region_names_are_unique_and_limited_in_number(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("forebay.modelserver.regions.REGIONS_MAX", 2)
    assert REGIONS_MAX > 2
    regions = SharedRegions(str(folder))
    regions.register(region("b"))
    with pytest.raises(Refused, match="shared memory region 'b' already in manager"):
        regions.register(region("b"))
    regions.register(region("a"))
    with pytest.raises(Refused, match="too many regions"):
        regions.register(region("c"))
    assert [each.name for each in regions.status(MemoryKind.SYSTEM, "")] == ["a", "b"]
    assert regions.status(MemoryKind.SYSTEM, "b") == [region("b")]
    assert regions.status(MemoryKind.CUDA, "") == []
    for kind, name, text in (
        (MemoryKind.SYSTEM, "q", "Unable to find system shared memory region: 'q'"),
        (MemoryKind.CUDA, "q", "Unable to find cuda shared memory region: 'q'"),
        (MemoryKind.CUDA, "b", "The region named 'b' is registered as system shared memory, not CUDA shared memory"),
    ):
        with pytest.raises(Refused, match=text):
            regions.status(kind, name)
    regions.unregister(MemoryKind.CUDA, "")
    regions.unregister(MemoryKind.SYSTEM, "q")
    regions.unregister(MemoryKind.SYSTEM, "b")
    assert [each.name for each in regions.status(MemoryKind.SYSTEM, "")] == ["a"]
    regions.unregister(MemoryKind.SYSTEM, "")
    assert regions.status(MemoryKind.SYSTEM, "") == []


@pytest.mark.parametrize(
    ("offset", "size", "text"),
    [
        (32, 1, "Invalid offset for shared memory region: 'r'"),
        (31, 2, "Invalid offset [+] byte size for shared memory region: 'r'"),
        (0, 2**64 - 1, "Invalid offset [+] byte size for shared memory region: 'r'"),
    ],
)
def test_access_outside_a_region_is_rejected(folder: Path, offset: int, size: int, text: str) -> None:
    regions = SharedRegions(str(folder))
    regions.register(region())
    with pytest.raises(Refused, match=text):
        regions.read("r", offset, size)
    with pytest.raises(Refused, match=text):
        regions.target("r", offset, size)
    with pytest.raises(Refused, match="Unable to find shared memory region: 'q'"):
        regions.read("q", 0, 1)
    with pytest.raises(Refused, match="should be at least 3 bytes to hold the results"):
        regions.target("r", 0, 2).put("OUT", b"abc")


def test_shrunk_region_is_an_error_not_a_crash(folder: Path) -> None:
    regions = SharedRegions(str(folder))
    regions.register(region())
    target = regions.target("r", 0, 32)
    os.truncate(folder / "k", 20)
    with pytest.raises(Refused, match="no longer as large as it was registered"):
        regions.read("r", 0, 32)
    with pytest.raises(Refused, match="no longer as large as it was registered"):
        target.put("OUT", bytes(32))
    assert (folder / "k").stat().st_size == 20
    assert bytes(regions.read("r", 0, 4)) == bytes([16, 17, 18, 19])


def test_unregistered_region_stays_usable_by_requests_in_flight(folder: Path) -> None:
    regions = SharedRegions(str(folder))
    regions.register(region())
    target = regions.target("r", 0, 4)
    regions.unregister(MemoryKind.SYSTEM, "")
    (folder / "k").rename(folder / "elsewhere")
    target.put("OUT", b"late")
    assert (folder / "elsewhere").read_bytes()[16:20] == b"late"


def test_large_inputs_are_read_into_memory_that_models_can_map(folder: Path) -> None:
    data = bytes(range(256)) * 2048
    (folder / "k").write_bytes(bytes(16) + data)
    regions = SharedRegions(str(folder), Staging())
    regions.register(region(size=len(data)))
    view = regions.read("r", 256, len(data) - 256)
    assert view == data[256:]
    assert where(view) is not None
    assert where(regions.read("r", 0, 32)) is None
    os.truncate(folder / "k", 1000)
    with pytest.raises(Refused, match="no longer as large as it was registered"):
        regions.read("r", 0, len(data))


def test_region_in_a_full_folder_is_an_error_that_names_it(folder: Path) -> None:
    regions = SharedRegions(str(folder))
    regions.register(region())
    target = regions.target("r", 0, 32)
    room = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (20, room[1]))
    try:
        with pytest.raises(Refused, match="shared memory region 'r' cannot be written: ") as refused:
            target.put("OUT", bytes(32))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, room)
    assert refused.value.kind is Kind.UNAVAILABLE
