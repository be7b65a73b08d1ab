"""The alarm of the model server's schedulers."""

import asyncio
import os
import resource
from collections.abc import Callable, Coroutine
from math import inf
from time import monotonic
from typing import Any

import pytest
import uvloop

from forebay.modelserver.alarm import Alarm

Run = Callable[[Coroutine[Any, Any, None]], None]
LOOPS = pytest.mark.parametrize("run", [asyncio.run, uvloop.run], ids=["asyncio", "uvloop"])


@LOOPS
def test_alarm_fires_once_at_the_earliest_time(run: Run) -> None:
    async def rings() -> None:
        rang: list[float] = []
        heard = asyncio.Event()
        alarm = Alarm(lambda: (rang.append(monotonic()), heard.set()))
        now = monotonic()
        for earlier_s in (0.0, 0.0004, 0.002):  # so late that it may ring for the first time only, then again
            at = now + 0.003 - earlier_s
            alarm.set(at)
        alarm.set(inf)
        await heard.wait()
        assert len(rang) == 1
        assert rang[0] >= at
        heard.clear()
        alarm.set(monotonic() - 1)  # it may be set again, and a time that is over is now
        await heard.wait()
        alarm.close()

    run(rings())


@LOOPS
def test_alarm_fires_without_a_descriptor_for_it(run: Run) -> None:
    async def rings() -> None:
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        heard = asyncio.Event()
        alarm, closed = Alarm(heard.set), Alarm(heard.clear)
        at = monotonic() + 0.003
        resource.setrlimit(resource.RLIMIT_NOFILE, (0, hard))
        try:
            alarm.set(at)
            closed.set(at)
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        closed.close()
        await heard.wait()
        assert monotonic() >= at
        heard.clear()
        alarm.set(monotonic())
        await heard.wait()
        alarm.close()

    run(rings())


@LOOPS
def test_closed_alarm_does_not_fire_and_leaks_nothing(run: Run) -> None:
    async def closed() -> None:
        before = len(os.listdir("/proc/self/fd"))
        rang: list[int] = []
        alarm, unused = Alarm(lambda: rang.append(1)), Alarm(lambda: rang.append(2))
        alarm.set(monotonic())
        alarm.close()
        unused.close()
        unused.set(monotonic())
        for _ in range(5):
            await asyncio.sleep(0)
        assert not rang
        assert len(os.listdir("/proc/self/fd")) == before

    run(closed())


def test_invalid_time_raises_oserror() -> None:
    async def refused() -> None:
        alarm = Alarm(lambda: None)
        with pytest.raises(OSError, match="Invalid argument"):
            alarm.set(-2.0)
        alarm.close()

    asyncio.run(refused())
