"""The memory budget: loaded models stay, loads wait in a queue for busy memory, and growth is noticed."""

import asyncio
from collections.abc import Awaitable
from pathlib import Path
from time import monotonic
from typing import Any

import pytest
from tests.modelserver.models.rig import (
    BATCH_SIZE,
    LOG,
    PATIENCE_S,
    Server,
    config,
    numbers,
    serving,
    tensor,
    until,
    write,
)
from tests.modelserver.replica.models import onnx_file

from forebay.core.serving.errors import Kind, Refused
from forebay.modelserver.models.life.memory import (
    PASSES_MAX,
    PROCESS_BYTES,
    LoadCancelled,
    MemoryManager,
    guessed_bytes,
)
from forebay.modelserver.models.options import Control, Options
from forebay.modelserver.telemetry.latencies import Latencies
from forebay.modelserver.telemetry.metrics import ServerMetrics

ONE = tensor("IN", [[1.0]])
MIB = 2**20
HEAVY = """
    def initialize(self, args):
        self.weights = np.ones(120 * 2**20, dtype=np.uint8)
    def answer(self, request):
        return give(get(request))
"""
GROWING = """
    def answer(self, request):
        self.weights = np.ones(int(get(request)[0, 0]) * 2**20, dtype=np.uint8)
        return give(get(request))
"""


class FakeVersion:
    """A version without processes."""

    def __init__(self, name: str, size_bytes: int = 5, *, pinned: bool = False) -> None:
        self.name = self.key = name
        self.size_bytes = size_bytes
        self.pinned = pinned
        self.busy = self.dormant = self.held = False
        self.ended: asyncio.Event | None = None

    async def measured(self) -> int:
        return self.size_bytes

    def wake(self) -> None:
        """Nobody does."""

    def hold(self) -> None:
        assert not self.held
        self.held = True

    def resume(self) -> None:
        assert self.held
        self.held = False

    def sleep(self) -> Awaitable[None]:
        self.dormant = True
        return self._end()

    async def _end(self) -> None:
        if self.ended is not None:
            await self.ended.wait()


class Rig:
    """A room of 10 bytes, and who wants to be in it."""

    def __init__(self, tasks: asyncio.TaskGroup, turn_s: float, pause_s: float) -> None:
        self.tasks = tasks
        self.memory = MemoryManager(10, turn_s, tasks, pause_s=pause_s)
        self.order: list[str] = []

    async def admit(self, fake: FakeVersion, wait_s: float = PATIENCE_S) -> None:
        await self.memory.admit(fake, fake.size_bytes, wait_s)
        fake.dormant = False
        self.order.append(fake.name)

    async def line_up(self, *fakes: FakeVersion) -> list["asyncio.Task[None]"]:
        """They ask for memory, and wait."""
        waiting = [self.tasks.create_task(self.admit(fake)) for fake in fakes]
        await turns()
        return waiting

    async def hold(self, *fakes: FakeVersion) -> None:
        """They are loaded, and have requests."""
        for fake in fakes:
            fake.busy = True
            await self.admit(fake)
            self.memory.loaded(fake)
        self.order.clear()

    async def idle(self, fake: FakeVersion) -> None:
        """Its requests have ended."""
        fake.busy = False
        self.memory.leave(fake)
        await turns()


async def turns() -> None:
    for _ in range(10):
        await asyncio.sleep(0)


def in_room(work: Any, turn_s: float = PATIENCE_S, pause_s: float = 0.0) -> None:
    async def main() -> None:
        async with asyncio.timeout(PATIENCE_S), asyncio.TaskGroup() as tasks:
            await work(Rig(tasks, turn_s, pause_s))

    asyncio.run(main())


def test_model_being_loaded_is_not_evicted() -> None:
    async def work(rig: Rig) -> None:
        a, b = FakeVersion("a"), FakeVersion("b", 8)
        await rig.admit(a)
        await rig.line_up(b)
        assert rig.order == ["a"]
        rig.memory.loaded(a)
        await turns()
        assert (rig.order, a.dormant) == (["a", "b"], True)

    in_room(work)


def test_a_model_larger_than_estimated_evicts_others_at_once() -> None:
    async def work(rig: Rig) -> None:
        a, b = FakeVersion("a", 4), FakeVersion("b", 4)
        await rig.admit(a)
        await rig.admit(b)
        rig.memory.loaded(a)
        assert await rig.memory.settle(b, 8, anyway=False)
        assert a.dormant
        c = FakeVersion("c", 2)
        await rig.admit(c)
        assert not await rig.memory.settle(c, 3, anyway=False), "b is being loaded"
        with pytest.raises(Refused, match=r"^model 'c' needs "):
            await rig.memory.settle(c, 11, anyway=True)

    in_room(work)


def test_waiting_models_load_in_order_once_evicted_processes_have_ended() -> None:
    async def work(rig: Rig) -> None:
        a, b = FakeVersion("a"), FakeVersion("b")
        a.ended = asyncio.Event()
        await rig.hold(a, b)
        await rig.line_up(FakeVersion("c"), FakeVersion("d"))
        await rig.idle(a)
        assert (a.dormant, rig.order) == (True, [])
        a.ended.set()
        await turns()
        assert rig.order == ["c"]
        await rig.idle(b)
        assert rig.order == ["c", "d"]

    in_room(work)


def test_small_models_pass_a_waiting_large_one_a_limited_number_of_times() -> None:
    async def work(rig: Rig) -> None:
        busy = FakeVersion("busy", 4)
        await rig.hold(busy)
        await rig.line_up(FakeVersion("large", 10))
        for number in range(PASSES_MAX):
            small = FakeVersion(str(number))
            await rig.admit(small)
            rig.memory.remove(small)
        assert len(rig.order) == PASSES_MAX
        await rig.line_up(FakeVersion("late"))
        assert len(rig.order) == PASSES_MAX
        await rig.idle(busy)
        assert rig.order[-1] == "large"
        rig.memory.remove(FakeVersion("large"))
        await turns()
        assert rig.order[-1] == "late"

    in_room(work)


def test_a_memory_timeout_has_retry_after_and_an_impossible_model_fails_at_once() -> None:
    async def work(rig: Rig) -> None:
        await rig.hold(FakeVersion("busy", 6))
        with pytest.raises(Refused, match=r"'n' has waited .* of memory: the models that hold it are busy") as caught:
            await rig.admit(FakeVersion("n"), 0.001)
        assert (caught.value.kind, caught.value.retry_after_s) == (Kind.UNAVAILABLE, 1)
        with pytest.raises(Refused, match=r"^model 'huge' needs .*, more than the memory budget of") as caught:
            await rig.admit(FakeVersion("huge", 11))
        assert caught.value.retry_after_s == 0

    in_room(work)


def test_a_load_without_waiting_requests_leaves_the_queue() -> None:
    async def work(rig: Rig) -> None:
        busy, gone = FakeVersion("busy", 6), FakeVersion("gone", 9)
        await rig.hold(busy)
        with pytest.raises(LoadCancelled):
            await rig.admit(gone, 0)
        waiting = asyncio.gather(rig.admit(gone), return_exceptions=True)
        (cancelled, _) = await rig.line_up(FakeVersion("cancelled", 9), FakeVersion("b"))
        rig.memory.withdraw(gone)
        cancelled.cancel()
        assert isinstance((await waiting)[0], LoadCancelled)
        await rig.idle(busy)
        assert rig.order == ["b"]

    in_room(work)


def test_turns_end_oldest_first_and_only_as_many_as_needed() -> None:
    async def work(rig: Rig) -> None:
        pinned, a, b = FakeVersion("pinned", 2, pinned=True), FakeVersion("a", 4), FakeVersion("b", 4)
        await rig.hold(pinned, a, b)
        c, d = FakeVersion("c", 3), FakeVersion("d", 3)
        await rig.line_up(c, d)
        assert (pinned.held, a.held, b.held) == (False, True, False)
        await rig.idle(a)
        assert (rig.order, a.dormant) == (["c"], True)
        assert b.held, "d is the first now, and c is being loaded"
        await rig.idle(b)
        assert (rig.order, b.dormant) == (["c", "d"], True)

    in_room(work, turn_s=0.0)


def test_a_model_that_cannot_free_enough_memory_is_not_held() -> None:
    async def work(rig: Rig) -> None:
        a, loading = FakeVersion("a", 4), FakeVersion("loading", 4)
        await rig.hold(a)
        await rig.admit(loading)
        (waiting,) = await rig.line_up(FakeVersion("large", 9))
        assert not a.held
        loading.busy = True
        rig.memory.enter(loading)
        rig.memory.loaded(loading)
        await turns()
        assert (a.held, loading.held) == (True, True)
        waiting.cancel()

    in_room(work, turn_s=0.0)


def test_held_model_resumes_when_no_model_waits_for_memory() -> None:
    async def work(rig: Rig) -> None:
        busy = FakeVersion("busy", 6)
        await rig.hold(busy)
        with pytest.raises(LoadCancelled):
            await rig.admit(FakeVersion("to be kept warm"), 0)
        assert not busy.held
        (cancelled,) = await rig.line_up(FakeVersion("cancelled"))
        assert busy.held
        cancelled.cancel()
        await turns()
        assert not busy.held

    in_room(work, turn_s=0.0)


def test_turn_ends_after_turn_s() -> None:
    async def work(rig: Rig) -> None:
        busy = FakeVersion("busy", 6)
        await rig.hold(busy)
        (waiting,) = await rig.line_up(FakeVersion("b"))
        assert not busy.held
        await until("its turn is over", lambda: busy.held)
        waiting.cancel()

    in_room(work, turn_s=0.05)


def test_closed_loop_client_keeps_its_model_loaded_between_requests() -> None:
    async def work(rig: Rig) -> None:
        a = FakeVersion("a", 6)
        await rig.hold(a)
        await rig.line_up(FakeVersion("b"))
        for _ in range(3):
            await rig.idle(a)
            assert rig.order == []
            rig.memory.enter(a)
        await rig.idle(a)
        await until("the pause is too long", lambda: rig.order == ["b"])
        assert a.dormant

    in_room(work, pause_s=0.05)


def test_pause_ends_with_the_turn_and_at_shutdown() -> None:
    async def over(rig: Rig) -> None:
        a, b = FakeVersion("a", 6), FakeVersion("b")
        await rig.hold(a)
        await rig.line_up(b)
        await until("its turn is over", lambda: a.held)
        await rig.idle(a)
        assert rig.order == ["b"]

    async def closing(rig: Rig) -> None:
        a = FakeVersion("a", 6)
        await rig.hold(a)
        await rig.line_up(FakeVersion("b"))
        await rig.idle(a)
        rig.memory.close()
        await turns()
        assert rig.order == ["b"]

    in_room(over, turn_s=0.05, pause_s=PATIENCE_S)
    in_room(closing, pause_s=PATIENCE_S)


def test_startup_models_exceeding_the_budget_are_all_ready(tmp_path: Path) -> None:
    names = tuple("abcdef")
    for name in names:
        write(tmp_path, name, config(), HEAVY)

    async def main() -> None:
        async with serving(tmp_path, startup=names, memory_bytes=400 * MIB) as server:
            assert [server.states(name) for name in names] == [{"1": ("READY", "")}] * 6
            assert not await server.started()
            assert sum(map(bool, map(server.pids, names))) == 2
            for name in names:
                assert await server.numbers(name, ONE) == [[1.0]]

    asyncio.run(main())


def test_startup_failure_names_the_model(tmp_path: Path) -> None:
    write(tmp_path, "huge", config(), HEAVY)

    async def main() -> None:
        options = Options(
            repositories=(tmp_path,), control=Control.EXPLICIT, startup=("huge",), memory_bytes=100 * MIB
        )
        server = Server(options, LOG)
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(server.run())
            (problem,) = await server.started()
            server.stop()
        assert "model 'huge' needs 0.1" in problem
        assert "more than the memory budget of 0.10 GiB" in problem

    asyncio.run(main())


def test_estimate_of_a_bare_file_counts_only_its_own_files(tmp_path: Path) -> None:
    for name, size_bytes in (("m.onnx", 1), ("m.onnx.data", 20), ("m50.onnx", 300), ("other.onnx", 4000)):
        (tmp_path / name).write_bytes(bytes(size_bytes))

    assert guessed_bytes(tmp_path, "m.") == PROCESS_BYTES + 21


def test_bare_file_is_served_next_to_one_larger_than_the_budget(tmp_path: Path) -> None:
    onnx_file(tmp_path / "small.onnx")
    with (tmp_path / "large.onnx").open("wb") as file:
        file.truncate(2**40)

    async def main() -> None:
        async with serving(tmp_path, startup=("small",), memory_bytes=500 * MIB) as server:
            assert server.states("small") == {"1": ("READY", "")}

    asyncio.run(main())


def test_no_request_is_lost_when_three_models_share_memory_for_two(tmp_path: Path) -> None:
    for name in ("a", "b", "c"):
        write(tmp_path, name, config(), HEAVY)

    async def main() -> None:
        async with serving(tmp_path, startup=("a", "b", "c"), memory_bytes=400 * MIB) as server:

            async def client(name: str) -> None:
                for _ in range(4):
                    assert await server.numbers(name, ONE) == [[1.0]]

            async with asyncio.TaskGroup() as tasks:
                clients = [tasks.create_task(client(name)) for name in ("a", "b", "c")]
                while not all(each.done() for each in clients):
                    assert server.ready, "models that are put to sleep or woken are ready"
                    await asyncio.sleep(0)
            memory = server.memory()
            assert (memory.resident, memory.sleeping, memory.budget_bytes) == (2, 1, 400 * MIB)
            assert 200 * MIB < memory.used_bytes < 400 * MIB
            assert memory.sleeps == memory.wakes + 1 > 0
            show = ServerMetrics(server.itself, Latencies())
            show.memory = memory
            text = show.render().decode()
            assert f'forebay_modelserver_swaps_total{{event="wake"}} {memory.wakes}\n' in text
            assert "forebay_modelserver_models_sleeping 1\n" in text

    asyncio.run(main())


def test_request_waiting_for_memory_keeps_its_deadline_and_gets_retry_after(tmp_path: Path) -> None:
    gate, root = tmp_path / "gate", tmp_path / "r"
    write(root, "a", config(), HEAVY)
    write(root, "b", config(), HEAVY + BATCH_SIZE.format(gate=str(gate)))

    async def main() -> None:
        async with serving(root, startup=("a", "b"), memory_bytes=250 * MIB, room_wait_s=0.05, turn_s=0.0) as server:
            gate.touch()
            busy = server.ask("b", ONE)
            await until("it is awake", lambda: server.pids("b"))
            late = await server.ask("a", ONE, deadline=monotonic() + 0.001).error()
            assert (late.kind, late.retry_after_s) == (Kind.DEADLINE_EXCEEDED, 1)
            assert "its deadline passed" in late.text
            await until("nobody waits", lambda: not server.itself._memory._queue)
            crowded = await server.ask("a", ONE).error()
            assert (crowded.kind, crowded.retry_after_s) == (Kind.UNAVAILABLE, 1)
            assert "'a' has waited 0 s for" in crowded.text
            gate.unlink()
            assert numbers(await busy.one()) == [[1.0]]
            assert await server.numbers("a", ONE) == [[1.0]]

    asyncio.run(main())


def test_growing_model_is_remeasured_and_evicts_others(tmp_path: Path) -> None:
    for name in ("a", "b"):
        write(tmp_path, name, config(), GROWING)

    async def main() -> None:
        async with serving(tmp_path, startup=("a", "b"), memory_bytes=300 * MIB, measure_s=0.02) as server:
            assert await server.numbers("a", tensor("IN", [[100.0]])) == [[100.0]]
            assert await server.numbers("b", tensor("IN", [[200.0]])) == [[200.0]]
            await until("a sleeps", lambda: not server.pids("a"))
            assert server.pids("b")
            assert await server.numbers("b", tensor("IN", [[400.0]])) == [[400.0]]
            await until("it is known", lambda: server.memory().used_bytes > 300 * MIB)
            assert server.pids("b"), "it would only be loaded again"
            assert await server.numbers("a", ONE) == [[1.0]]
            assert await server.numbers("b", ONE) == [[1.0]], "it fits again, fresh"

    asyncio.run(main())


def test_always_busy_models_take_turns_without_losing_requests(tmp_path: Path) -> None:
    for name in ("a", "b"):
        write(tmp_path, name, config(), HEAVY)

    async def main() -> None:
        limits: dict[str, Any] = {"memory_bytes": 250 * MIB, "turn_s": 0.05}
        async with serving(tmp_path, startup=("a", "b"), **limits) as server:
            answered = {"a": 0, "b": 0}

            async def client(name: str) -> None:
                while server.memory().wakes < 4 or not all(answered.values()):
                    assert await server.numbers(name, ONE) == [[1.0]]
                    answered[name] += 1

            await asyncio.gather(*(client(name) for name in ("a", "b") for _ in range(8)))
            failures = [server.itself.statistics(name, "")[0].failures for name in ("a", "b")]
            assert [sum(each.values()) for each in failures] == [0, 0]

    asyncio.run(main())


def test_held_model_finishes_its_requests_when_unloaded(tmp_path: Path) -> None:
    gate, root = tmp_path / "gate", tmp_path / "r"
    write(root, "a", config(), HEAVY + BATCH_SIZE.format(gate=str(gate)))
    write(root, "b", config(), HEAVY)

    async def main() -> None:
        async with serving(root, startup=("a", "b"), memory_bytes=250 * MIB, turn_s=0.0) as server:
            assert await server.numbers("a", ONE) == [[1.0]]
            gate.touch()
            running = server.ask("a", ONE)
            waiting = server.ask("b", ONE)
            await until("a is held", lambda: server.itself._memory._held)
            held = server.ask("a", ONE)
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(server.itself.unload("a", False))
                await asyncio.sleep(0)
                gate.unlink()
                assert [numbers(await each.one()) for each in (running, held, waiting)] == [[[1.0]]] * 3

    asyncio.run(main())
