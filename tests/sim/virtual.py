"""Waiting in tests on virtual time, where it takes no real time."""

import asyncio

from forebay.sim.loop import VirtualLoop


async def elapse(seconds: float) -> None:
    """Let virtual time pass. Fails on a loop whose time is real: there one waits for a condition."""
    loop = asyncio.get_running_loop()
    assert isinstance(loop, VirtualLoop)
    over = asyncio.Event()
    timer = loop.call_later(seconds, over.set)
    try:
        await over.wait()
    finally:
        timer.cancel()
