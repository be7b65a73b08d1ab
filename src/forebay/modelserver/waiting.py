"""Awaits within exception handlers and contexts, on behalf of compiled modules.

A compiled coroutine keeps the exception that it is handling in the thread's state instead of its own: of two that
wait in a handler, one resumes with the other's exception, or with none. So compiled modules never await in a handler,
and a task group does so when its body has failed. This module is never compiled.
"""

import asyncio
from collections.abc import Awaitable, Callable, Coroutine, Iterable
from typing import Any, TypeVar

T = TypeVar("T")


async def in_group(work: Callable[[asyncio.TaskGroup], Awaitable[T]]) -> T:
    """Run something with a task group that ends with it. Raises as the group does."""
    async with asyncio.TaskGroup() as tasks:
        return await work(tasks)


async def all_of(works: Iterable[Coroutine[Any, Any, None]]) -> None:
    """Run all concurrently; if one fails, cancel the others. Raises as a task group does."""
    async with asyncio.TaskGroup() as tasks:
        for work in works:
            tasks.create_task(work)


async def and_finally(work: Awaitable[T], end: Callable[[], Awaitable[None]]) -> T:
    """Run `work`, then `end` whatever its outcome."""
    try:
        return await work
    finally:
        await end()
