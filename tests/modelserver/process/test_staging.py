"""Staged inputs: the child maps the memory that they arrived in, and gets no copy."""

import asyncio
import gc
import os
import threading
import weakref
from pathlib import Path

import numpy as np
import pytest
from tests.modelserver.process.rig import answers, spec, started, until, values, work

from forebay.core.serving.config import Datatype
from forebay.core.serving.values import Tensor
from forebay.modelserver.process import segments
from forebay.modelserver.process.segments import STAGED_BYTES_MIN, Staging, where
from forebay.modelserver.process.values import Work

COUNT = STAGED_BYTES_MIN // 4


def staged(staging: Staging, fill: float, shift: int = 0, do: str = "echo") -> Work:
    """A request with input x of `COUNT` floats, `shift` bytes behind what is aligned."""
    room = staging.take(shift + 4 * COUNT)
    assert room is not None
    view = room[shift:]
    view[:] = np.full(COUNT, fill, np.float32).tobytes()
    return Work("", (Tensor("x", Datatype.FP32, (COUNT,), view),), parameters={"do": do})


def segment_of(view: memoryview) -> segments.Segment:
    place = where(view)
    assert place is not None
    return place[0]


def test_staged_inputs_reach_the_model_beside_others(tmp_path: Path) -> None:
    staging = Staging()

    async def scene() -> None:
        async with started(spec(tmp_path)) as process:
            for _ in range(3):  # the second time, both ends know the segments
                works = [
                    staged(staging, 1),
                    work(data=[2.0]),
                    staged(staging, 3, shift=4),
                    staged(staging, 4, shift=3),
                ]
                got = await answers(process, *works)
                assert [set(values(answer)) for answer in got] == [{1}, {2}, {3}, {4}]
                del works, got
            (answer,) = await answers(process, staged(staging, 5, do="facts"))
            assert (answer.parameters["aligned"], answer.parameters["writeable"]) == (True, True)

    asyncio.run(scene())


def test_model_that_writes_to_a_staged_input_changes_it_for_itself_only(tmp_path: Path) -> None:
    staging = Staging()

    async def scene() -> None:
        async with started(spec(tmp_path)) as process:
            once = staged(staging, 1, do="add in place")
            for _ in range(2):
                (answer,) = await answers(process, once)
                assert set(values(answer)) == {2}
            assert set(np.frombuffer(once.inputs[0].data, np.float32)) == {1}

    asyncio.run(scene())


def test_inputs_of_a_batch_that_share_staged_memory_are_written_to_apart(tmp_path: Path) -> None:
    staging = Staging()

    async def scene() -> None:
        async with started(spec(tmp_path)) as process:
            works = [staged(staging, 1, do="add in place")] * 3  # as steps of an ensemble with the same model
            assert [set(values(answer)) for answer in await answers(process, *works)] == [{2}, {2}, {2}]

    asyncio.run(scene())


def test_staged_memory_is_used_again_once_the_last_view_of_it_is_gone() -> None:
    staging = Staging()
    view = staging.take(STAGED_BYTES_MIN)
    assert view is not None
    first, part = segment_of(view), view[100:200]
    del view
    other = staging.take(STAGED_BYTES_MIN)
    assert other is not None
    assert segment_of(other) is not first
    dropping = threading.Thread(target=part.release)
    dropping.start()
    dropping.join()
    again = staging.take(STAGED_BYTES_MIN)
    assert again is not None
    assert segment_of(again) is first
    del other, again


def test_memory_of_a_burst_is_freed_without_another_request(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(segments, "KEPT_BYTES_MAX", 4 * STAGED_BYTES_MIN)
    staging = Staging()

    def mapped(pid: int) -> int:
        return Path(f"/proc/{pid}/maps").read_text().count("memfd:forebay")

    async def scene() -> None:
        async with started(spec(tmp_path)) as process:
            works = [staged(staging, fill) for fill in range(8)]
            small = np.ones(COUNT // 8, np.float32)  # these are copied into a segment of the channel
            await answers(process, *works, *[work(data=small)] * 32)
            works.clear()
            await until(lambda: mapped(process.pids[0]) <= 5)  # one is of its outputs

    before = mapped(os.getpid())
    asyncio.run(scene())
    assert mapped(os.getpid()) <= before + 5


def test_staging_is_used_by_several_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    staging, slow, taken = Staging(), threading.Event(), list[memoryview | None]()
    created = os.memfd_create

    def create(name: str, flags: int) -> int:
        slow.wait(1)
        return created(name, flags)

    monkeypatch.setattr(os, "memfd_create", create)
    monkeypatch.setattr(segments, "STAGED_MAX", 1)
    threads = [threading.Thread(target=lambda: taken.append(staging.take(STAGED_BYTES_MIN))) for _ in range(2)]
    for thread in threads:
        thread.start()
    slow.set()
    for thread in threads:
        thread.join()
    assert sum(view is not None for view in taken) == 1


def test_what_staging_cannot_take_is_left_to_others(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(segments, "STAGED_MAX", 2)
    staging = Staging()
    assert staging.take(STAGED_BYTES_MIN - 1) is None
    assert staging.take(1 << 50) is None
    held = [staging.take(STAGED_BYTES_MIN) for _ in range(3)]
    assert [view is None for view in held] == [False, False, True]
    held.clear()

    def without_memory(name: str, flags: int) -> int:
        raise OSError(24, "Too many open files")

    monkeypatch.setattr(os, "memfd_create", without_memory)
    assert staging.take(2 * STAGED_BYTES_MIN) is None  # no free segment is as large
    assert staging.take(STAGED_BYTES_MIN) is not None
    gc.collect()


def test_tensors_are_aligned_where_the_client_says_that_they_begin() -> None:
    staging = Staging()
    for at in (0, 1, 63, 64, 1000, STAGED_BYTES_MIN, 10**17):
        view = staging.take(STAGED_BYTES_MIN + 1, at)
        assert view is not None
        assert len(view) == STAGED_BYTES_MIN + 1
        place = where(view)
        assert place is not None
        assert (place[1] + at) % segments.ALIGN == 0
        del view, place


def test_staged_memory_keeps_nothing_of_processes_that_have_ended(tmp_path: Path) -> None:
    staging = Staging()
    kept = []

    async def scene() -> None:
        for _ in range(3):
            async with started(spec(tmp_path)) as process:
                await answers(process, staged(staging, 1))
            gc.collect()
            kept.append(len(weakref.finalize._registry))  # type: ignore[attr-defined]  # no public count

    asyncio.run(scene())
    assert kept == kept[:1] * 3
