"""Virtual time: ordering, the end of a run, and reproducibility."""

import asyncio
import contextvars
import hashlib
import os
import subprocess
import sys
from collections.abc import AsyncIterator, Callable, Coroutine
from random import Random
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.sim.virtual import elapse

from forebay.obs.clock import new_id, wall_s
from forebay.sim import loop as module
from forebay.sim.loop import EPOCH_S, Deadlock, OutOfTime, run

DAY_S = 86_400.0
REPEATS = 30


def simulate(main: Callable[[], Coroutine[Any, Any, Any]], seconds_max: float = 10 * DAY_S) -> Any:
    return run(main(), seconds_max=seconds_max)


def now() -> float:
    return asyncio.get_running_loop().time()


# --- time


def test_virtual_day_passes_at_once_with_exact_time() -> None:
    async def main() -> float:
        while now() < DAY_S:
            await asyncio.sleep(60)
        return now()

    assert simulate(main) == DAY_S


def test_timeouts_and_queues_obey_virtual_time() -> None:
    async def main() -> list[float]:
        queue: asyncio.Queue[float] = asyncio.Queue()
        got = []

        async def put() -> None:
            for n in range(3):
                await elapse(10)
                queue.put_nowait(n)

        async with asyncio.TaskGroup() as group:
            group.create_task(put())
            for _ in range(3):
                got += [await queue.get(), now()]
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(5):
                await queue.get()
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(queue.get(), 5)
        return [*got, now()]

    assert simulate(main) == [0, 10, 1, 20, 2, 30, 40]


@given(st.lists(st.sampled_from([-1.0, 0.0, 0.5, 1.0, 1.0, 2.0]), max_size=30), st.integers(0, 30))
def test_timers_run_in_the_order_of_their_times_and_then_of_their_calls(delays: list[float], gone: int) -> None:
    ran: list[tuple[float, int]] = []

    async def main() -> None:
        loop = asyncio.get_running_loop()
        handles = [
            loop.call_later(delay, lambda n=n: ran.append((now(), n)))  # type: ignore[misc]
            for n, delay in enumerate(delays)
        ]
        for handle in handles[gone:][:2]:
            handle.cancel()
            assert handle.cancelled()
        await elapse(3)

    simulate(main)
    left = [(max(delay, 0.0), n) for n, delay in enumerate(delays) if not gone <= n < gone + 2]
    # what lies in the past runs as soon as what is due now, in the order of the times that were asked for
    assert [at for at, _ in ran] == sorted(at for at, _ in left)
    assert ran == sorted(left, key=lambda each: (delays[each[1]], each[1]))


def test_ready_callbacks_run_in_iterations() -> None:
    ran: list[str] = []

    async def main() -> None:
        loop = asyncio.get_running_loop()

        def one() -> None:
            ran.append("one")
            loop.call_soon(ran.append, "three")

        loop.call_soon(one)
        cancelled = loop.call_soon(ran.append, "never")
        loop.call_soon_threadsafe(ran.append, "two")
        cancelled.cancel()
        await elapse(1)

    simulate(main)
    assert ran == ["one", "two", "three"]


def test_callbacks_run_in_the_context_that_they_were_scheduled_in_or_given() -> None:
    name = contextvars.ContextVar("name", default="nobody")
    seen: list[str] = []

    async def main() -> None:
        loop = asyncio.get_running_loop()
        given = contextvars.copy_context()
        given.run(name.set, "given")
        name.set("mine")
        loop.call_later(2, lambda: seen.append(name.get()), context=given)
        timer = loop.call_at(1, lambda: seen.append(name.get()))
        assert (timer.when(), timer.cancelled()) == (1, False)
        assert "at 1 s" in repr(timer)
        name.set("changed")
        await elapse(3)

    simulate(main)
    assert seen == ["mine", "given"]


def test_cancelled_timers_are_purged() -> None:
    async def main() -> int:
        loop = asyncio.get_running_loop()
        for _ in range(20_000):
            loop.call_later(1000, print).cancel()
            await elapse(0.001)
        return len(loop._timers)  # type: ignore[attr-defined]

    assert simulate(main) < 3 * module.TIMERS_SWEPT_MIN


def test_wall_clock_is_virtual_and_identifiers_are_seeded() -> None:
    async def main() -> tuple[float, str]:
        await elapse(DAY_S)
        return wall_s(), new_id("req")

    first, again, other = (run(main(), seconds_max=2 * DAY_S, seed=seed) for seed in (1, 1, 2))
    assert first == again
    assert first[0] == EPOCH_S + DAY_S == other[0]
    assert first[1] != other[1]


# --- the end


def test_deadlock_is_reported_at_once_with_its_place() -> None:
    async def wait_for_nobody(event: asyncio.Event) -> None:
        await event.wait()

    async def main() -> None:
        event = asyncio.Event()
        async with asyncio.TaskGroup() as group:
            group.create_task(wait_for_nobody(event), name="the lonely")
            await elapse(5)

    with pytest.raises(Deadlock, match="all tasks wait, and no timer is set, at 5 s") as caught:
        simulate(main)
    first, second = caught.value.waiting
    assert first.startswith(
        "Task-1: test_deadlock_is_reported_at_once_with_its_place.<locals>.main > TaskGroup.__aexit__"
    )
    assert second.startswith("the lonely: ")
    assert "wait_for_nobody > Event.wait (locks.py:" in second


def test_run_over_the_time_limit_ends_with_what_it_waits_for() -> None:
    async def main() -> None:
        while True:
            await asyncio.sleep(7)

    with pytest.raises(OutOfTime, match=r"not finished after 60 s[^\n]*\n  Task-1: .*main > sleep \(tasks.py:\d+\)"):
        simulate(main, 60)


def test_livelock_without_progress_of_time_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "ROUNDS_MAX", 1000)

    async def main() -> None:
        await elapse(2)
        while True:
            await asyncio.sleep(0)

    with pytest.raises(OutOfTime, match="time does not advance at 2 s"):
        simulate(main)


def test_report_of_waiting_tasks_is_bounded() -> None:
    async def main() -> None:
        async with asyncio.TaskGroup() as group:
            for _ in range(30):
                group.create_task(asyncio.Event().wait())

    with pytest.raises(Deadlock, match="and 11 more") as caught:
        simulate(main)
    assert len(caught.value.waiting) == 31


async def _broken() -> None:
    await elapse(1)
    raise KeyError("broken")


def _break() -> None:
    raise LookupError("in a callback")


def test_unhandled_exception_ends_the_run_and_is_raised() -> None:
    async def by_callback() -> None:
        asyncio.get_running_loop().call_later(3, _break)
        await elapse(DAY_S)

    async def by_handler() -> None:
        asyncio.get_running_loop().call_exception_handler({"message": "it went wrong"})
        await elapse(DAY_S)

    async def by_task() -> None:
        asyncio.get_running_loop().create_task(_broken())
        await elapse(DAY_S)

    async def by_main() -> None:
        await _broken()

    with pytest.raises(LookupError, match="in a callback") as caught:
        simulate(by_callback)
    assert "at 3 s of virtual time" in caught.value.__notes__[0]
    with pytest.raises(RuntimeError, match="it went wrong"):
        simulate(by_handler)
    with pytest.raises(KeyError, match="broken"):
        simulate(by_task)
    with pytest.raises(KeyError, match="broken"):
        simulate(by_main)


def test_unretrieved_task_exception_is_found_even_in_a_reference_cycle() -> None:
    async def main() -> None:
        task = asyncio.get_running_loop().create_task(_broken())
        task.circle = task  # type: ignore[attr-defined]
        await elapse(2)

    with pytest.raises(KeyError, match="broken"):
        simulate(main)


def test_several_errors_are_raised_as_a_group_with_that_of_main_first() -> None:
    async def main() -> None:
        asyncio.get_running_loop().call_soon(_break)
        await asyncio.sleep(0)
        raise ValueError("main")

    with pytest.raises(ExceptionGroup) as caught:
        simulate(main)
    assert [type(error) for error in caught.value.exceptions] == [ValueError, LookupError]


def test_collected_errors_are_bounded() -> None:
    async def main() -> None:
        for _ in range(2 * module.ERRORS_MAX):
            asyncio.get_running_loop().call_soon(_break)
        await elapse(1)

    with pytest.raises(ExceptionGroup) as caught:
        simulate(main)
    assert len(caught.value.exceptions) == module.ERRORS_MAX


def test_leftover_tasks_are_cancelled_in_order_and_may_take_virtual_time() -> None:
    ended: list[tuple[str, float]] = []

    async def linger(name: str, s: float) -> None:
        try:
            await elapse(DAY_S)
        finally:
            await elapse(s)
            ended.append((name, now()))

    async def spawn() -> None:
        try:
            await elapse(DAY_S)
        finally:
            tasks.append(asyncio.get_running_loop().create_task(linger("late", 0)))

    async def main() -> str:
        make = asyncio.get_running_loop().create_task
        tasks.extend([make(linger("slow", 20)), make(linger("quick", 10)), make(linger("second", 10)), make(spawn())])
        await elapse(1)
        return "done"

    tasks: list[asyncio.Task[None]] = []
    assert run(main(), seconds_max=5) == "done"
    assert ended[:3] == [("quick", 11), ("second", 11), ("slow", 21)]
    assert all(task.cancelled() for task in tasks[:3])


def test_leftover_task_that_fails_or_hangs_on_cancellation_is_reported() -> None:
    async def fail() -> None:
        try:
            await elapse(DAY_S)
        finally:
            raise KeyError("goodbye")

    async def hang() -> None:
        try:
            await elapse(DAY_S)
        except asyncio.CancelledError:
            await asyncio.get_running_loop().create_future()

    async def main(left: Callable[[], Coroutine[Any, Any, None]]) -> None:
        task = asyncio.get_running_loop().create_task(left())
        await elapse(1)
        assert not task.done()

    with pytest.raises(KeyError, match="goodbye"):
        simulate(lambda: main(fail))
    with pytest.raises(Deadlock):
        simulate(lambda: main(hang))


def test_endlessly_spawning_leftover_tasks_are_reported() -> None:
    async def heir() -> None:
        try:
            await elapse(DAY_S)
        except asyncio.CancelledError:
            asyncio.get_running_loop().create_task(heir()).set_name("heir")
            await asyncio.sleep(0)  # so that the heir has begun

    async def main() -> None:
        asyncio.get_running_loop().create_task(heir()).set_name("first")
        await elapse(1)

    with pytest.raises(RuntimeError, match="Task was destroyed but it is pending"):
        simulate(main)


def test_asynchronous_generators_are_closed_at_the_end() -> None:
    ended = []

    async def numbers() -> AsyncIterator[int]:
        try:
            yield 1
        finally:
            await elapse(1)
            ended.append(now())

    async def main() -> object:
        kept = numbers()
        async for _ in kept:
            break
        return kept

    simulate(main)
    assert ended == [1]


def test_keyboard_interrupt_ends_the_loop_and_cleans_up() -> None:
    async def main() -> None:
        asyncio.get_running_loop().call_later(1, interrupt)
        await elapse(5)

    def interrupt() -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        simulate(main)


def test_executor_work_takes_no_virtual_time() -> None:
    async def main() -> tuple[int, float]:
        with pytest.raises(ZeroDivisionError):
            await asyncio.to_thread(lambda: 1 // 0)
        return await asyncio.to_thread(sum, (1, 2)), asyncio.get_running_loop().time()

    assert simulate(main) == (3, 0.0)


def test_unsimulated_features_raise() -> None:
    async def main() -> None:
        loop = asyncio.get_running_loop()
        with pytest.raises(RuntimeError, match="no signals"):
            loop.add_signal_handler(15, print)
        with pytest.raises(RuntimeError, match="no network"):
            await loop.create_connection(asyncio.Protocol, "localhost", 80)
        with pytest.raises(RuntimeError, match="no network"):
            await loop.create_server(asyncio.Protocol, "localhost", 80)
        with pytest.raises(RuntimeError, match="inside a running event loop"):
            simulate(main)

    simulate(main)


# --- running alike


async def _jumble() -> str:
    """A digest of what goes through asyncio's sets: cancelled groups, `wait`, and the tasks that are there."""
    trace: list[object] = []
    loop, rng = asyncio.get_running_loop(), Random(7)

    async def work(name: str) -> str:
        try:
            await elapse(rng.random())
        except asyncio.CancelledError:
            trace.append(("cancelled", name, now()))
            raise
        if rng.random() < 0.02:
            raise KeyError(name)
        return name

    for wave in range(20):
        try:
            async with asyncio.TaskGroup() as group:
                for n in range(30):
                    group.create_task(work(f"{wave}.{n}"))
        except* KeyError as failed:
            trace.append([str(error) for error in failed.exceptions])
        tasks = [loop.create_task(work(f"{wave}/{n}")) for n in range(20)]
        done, pending = await asyncio.wait(tasks, timeout=0.5)
        trace.append([task.get_name() for task in (*done, *pending)])
        trace.append([str(task.exception()) for task in done])
        trace.append(sorted(task.get_name() for task in asyncio.all_tasks()))
        for task in pending:
            task.cancel()
        await asyncio.wait(tasks)
        trace.append([str(task.exception()) for task in tasks if not task.cancelled()])
    return hashlib.sha256(repr(trace).encode()).hexdigest()


def digest() -> str:
    return str(simulate(_jumble))


def test_loop_runs_are_reproducible_in_one_process() -> None:
    kept = []
    for _ in range(REPEATS):
        kept.append((digest(), [object() for _ in range(997)]))  # other tasks get other addresses
    assert len({hashed for hashed, _ in kept}) == 1


@pytest.mark.slow
def test_loop_runs_are_reproducible_across_processes_and_hash_seeds() -> None:
    code = f"import runpy; print(runpy.run_path({__file__!r})['digest']())"
    printed = {
        subprocess.run(
            [sys.executable, "-c", code], env={**os.environ, "PYTHONHASHSEED": seed}, capture_output=True, check=True
        ).stdout.strip()
        for seed in ("0", "1", "4294967295")
    }
    assert printed == {digest().encode()}
