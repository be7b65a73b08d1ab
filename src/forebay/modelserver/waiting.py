"""What waits while it handles an exception, for modules that are compiled.

A compiled coroutine has the exception that it handles in the thread's state, not in its own: of two that wait in a
handler, one goes on with the other's exception, or with none. So those modules do not wait in one, and a task group
does so when its body has failed. This module is never compiled.
"""

import asyncio
from collections.abc import Awaitable, Callable, Coroutine, Iterable
from typing import Any, TypeVar

T = TypeVar("T")


async def in_group(work: Callable[[asyncio.TaskGroup], Awaitable[T]]) -> T:
    """Do something with a task group, which ends with it. Raises as the group does."""
    async with asyncio.TaskGroup() as tasks:
        return await work(tasks)


async def all_of(works: Iterable[Coroutine[Any, Any, None]]) -> None:
    """Do them at the same time; if one fails, cancel the others. Raises as a task group does."""
    async with asyncio.TaskGroup() as tasks:
        for work in works:
            tasks.create_task(work)


async def and_finally(work: Awaitable[T], end: Callable[[], Awaitable[None]]) -> T:
    """Do the one, and the other whatever became of the first."""
    try:
        return await work
    finally:
        await end()
