"""Polls device sources with a timeout: a driver may hang, and its call cannot be cancelled."""

import asyncio
import threading
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Final, TypeVar

from forebay.core.health import DeviceEvent, DeviceReading
from forebay.providers.devices.protocol import DeviceSource, DevicesUnknown

T = TypeVar("T")
TIMEOUT_S: Final = 10.0
"""A driver that has been idle for a while takes seconds for each GPU."""


@dataclass(frozen=True, slots=True)
class Look:
    """The result of polling a source. `trouble`: why readings are unknown (None), or else why errors cannot be
    read."""

    readings: tuple[DeviceReading, ...] | None
    events: tuple[DeviceEvent, ...] = ()
    trouble: str = ""


class Watch:
    """One source. While a call hangs it is not polled again: there is never more than one thread. The result of a
    call that has returned late is that of the next look: a source reports an error only once."""

    def __init__(self, source: DeviceSource) -> None:
        self._source = source
        self._asked: asyncio.Future[Look] | None = None

    async def look(self, timeout_s: float = TIMEOUT_S) -> Look:
        """Poll the source. Never raises."""
        asked = self._asked
        if asked is None:
            asked = self._asked = _in_thread(self._ask)
            await asyncio.wait([asked], timeout=timeout_s)
            trouble = f"its driver has not responded for {timeout_s:g} s"
        else:
            trouble = "an earlier call of its driver has not returned"
        if not asked.done():
            return Look(None, trouble=trouble)
        self._asked = None
        return asked.result()

    def close(self) -> None:
        """Close the source, unless it hangs."""
        if self._asked is None or self._asked.done():
            self._source.close()

    def _ask(self) -> Look:
        readings, trouble = _tried(self._source.readings)
        events, deaf = _tried(self._source.events)
        return Look(readings, events or (), trouble or deaf)


def _tried(call: Callable[[], T]) -> tuple[T | None, str]:
    """The result of a call, or why it failed."""
    try:
        return call(), ""
    except DevicesUnknown as error:
        return None, str(error)
    except Exception as mistake:  # supervisor: a driver's library may raise anything, which says nothing of devices
        return None, f"{type(mistake).__name__}: {mistake}"


async def look_at_all(watches: Mapping[str, Watch], timeout_s: float) -> dict[str, Look]:
    """Poll all sources concurrently; results by node."""
    nodes = sorted(watches)
    looks = await asyncio.gather(*(watches[node].look(timeout_s) for node in nodes))
    return dict(zip(nodes, looks, strict=True))


def _in_thread(work: Callable[[], T]) -> "asyncio.Future[T]":
    """Run work in a daemon thread, which does not delay the exit of the process."""
    loop = asyncio.get_running_loop()
    future: asyncio.Future[T] = loop.create_future()

    def finish(found: T) -> None:
        if not future.done():
            future.set_result(found)

    def run() -> None:
        found = work()
        with suppress(RuntimeError):  # the loop is closed: the result is not needed any more
            loop.call_soon_threadsafe(finish, found)

    threading.Thread(target=run, name="devices", daemon=True).start()
    return future
