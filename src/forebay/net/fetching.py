"""Fetches small documents from other processes of the cluster, with the HTTP client of the request path."""

import asyncio
from dataclasses import dataclass
from typing import Final

from forebay.net.client import CallError, Header, Pool
from forebay.wire import http1

ANSWER_BYTES_MAX: Final = 8 * 1024 * 1024


@dataclass(frozen=True, slots=True)
class NoAnswer:
    """Why there is no document."""

    why: str
    too_large: bool = False
    """The status was 200, but the document exceeds the size limit."""
    ours: bool = False
    """As in `CallError`."""


class _Answer:
    """A sink that resolves a future with a whole response body."""

    def __init__(self, future: "asyncio.Future[bytes | NoAnswer]", bytes_max: int) -> None:
        self.future = future
        self.ended = False
        self._bytes_max = bytes_max
        self._status = 0
        self._body = b""

    def on_head(self, status: int, headers: list[Header]) -> None:
        self._status = status

    def on_body(self, data: bytes) -> None:
        if len(self._body) + len(data) <= self._bytes_max:
            self._body += data
        else:
            self._end(NoAnswer("the response is too large", too_large=self._status == 200))

    def on_end(self, trailers: list[Header]) -> None:
        self.ended = True
        self._end(self._body if self._status == 200 else NoAnswer(f"status {self._status}"))

    def on_error(self, error: CallError) -> None:
        self.ended = True
        self._end(NoAnswer(error.text, ours=error.ours))

    def _end(self, result: bytes | NoAnswer) -> None:
        if not self.future.done():
            self.future.set_result(result)


async def fetch(pool: Pool, target: bytes, timeout_s: float, bytes_max: int = ANSWER_BYTES_MAX) -> bytes | NoAnswer:
    """GET a small document. Failures and the timeout return `NoAnswer`; nothing is raised for them."""
    answer = _Answer(asyncio.get_running_loop().create_future(), bytes_max)
    call = pool.call(http1.request(b"GET", target, [(b"host", b"forebay")]), answer)
    try:
        async with asyncio.timeout(timeout_s):
            return await answer.future
    except TimeoutError:
        return NoAnswer(f"no response within {timeout_s:g} s")
    finally:
        if not answer.ended:
            call.cancel()


async def fetch_once(
    host: str, port: int, target: bytes, timeout_s: float, bytes_max: int = ANSWER_BYTES_MAX
) -> bytes | NoAnswer:
    """The same on a connection of its own, which is closed afterwards."""
    async with asyncio.TaskGroup() as group:
        pool = Pool(host, port, group, connect_timeout_s=timeout_s, idle_max=0)
        try:
            return await fetch(pool, target, timeout_s, bytes_max)
        finally:
            pool.close()
