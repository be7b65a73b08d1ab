"""Sends the requests of a plan and collects samples. One event loop and raw protocols keep the client cheap.

Times are from `perf_counter`: uvloop's clock has a resolution of 1 ms.
"""

import asyncio
import ssl
from collections.abc import Coroutine, Iterator
from dataclasses import dataclass
from itertools import count
from random import Random
from time import perf_counter

from forebay.cli.bench.answer import Answer
from forebay.cli.bench.plan import Recipe, arrivals, body, request_bytes
from forebay.cli.bench.stats import Sample, Samples
from forebay.net.client import Call, CallError, Pool

IN_FLIGHT_MAX = 10_000
"""Open loop: with this many requests in flight, further ones wait in the client, and their latency grows."""


@dataclass
class Progress:
    """The state of a run, for progress displays."""

    samples: Samples
    begun_s: float = 0.0
    ended_s: float = 0.0
    in_flight: int = 0
    warming: bool = False
    interrupted: bool = False

    def elapsed_s(self, now: float) -> float:
        """Duration of the measured run so far, in seconds."""
        return (self.ended_s or now) - self.begun_s if self.begun_s else 0.0


class Load:
    """One run of a plan. `run` once; `stop` ends it early and keeps what was measured. `tls`: for HTTPS."""

    def __init__(self, plan: Recipe, tls: ssl.SSLContext | None = None) -> None:
        self.plan = plan
        self._tls = tls
        self.progress = Progress(Samples())
        self._rng = Random(plan.seed)  # noqa: S311 - loads, not secrets
        self._numbers = count()
        self._stopped = asyncio.Event()

    def stop(self) -> None:
        """End now: requests in flight are abandoned and not counted."""
        self.progress.interrupted = True
        self._stopped.set()

    async def run(self) -> Samples:
        """Send all requests, and wait for the responses."""
        async with asyncio.TaskGroup() as group:
            target = self.plan.target
            pool = Pool(target.host, target.port, group, idle_max=IN_FLIGHT_MAX, tls=self._tls)
            try:
                await self._phases(pool)
            finally:
                pool.close()
        return self.progress.samples

    async def _phases(self, pool: Pool) -> None:
        if self.plan.warmup:
            self.progress.warming = True
            await self._until_stopped(
                self._closed(pool, Samples(), perf_counter(), iter(range(self.plan.warmup)), None)
            )
            self.progress.warming = False
        self.progress.begun_s = begun_s = perf_counter()
        ends_s = begun_s + self.plan.duration_s
        send = self._closed if self.plan.rate is None else self._open
        if not self._stopped.is_set():
            todo = iter(range(self.plan.requests))
            await self._until_stopped(send(pool, self.progress.samples, begun_s, todo, ends_s))
        self.progress.ended_s = perf_counter()

    async def _until_stopped(self, work: Coroutine[None, None, None]) -> None:
        async with asyncio.TaskGroup() as group:
            task = group.create_task(work)
            watch = group.create_task(self._stopped.wait())
            await asyncio.wait({task, watch}, return_when=asyncio.FIRST_COMPLETED)
            watch.cancel()
            task.cancel()

    async def _closed(
        self, pool: Pool, samples: Samples, begun_s: float, todo: Iterator[int], ends_s: float | None
    ) -> None:
        """`concurrency` clients; each sends its next request after the response to the last."""

        async def caller() -> None:
            for _ in todo:
                if ends_s is not None and perf_counter() >= ends_s:
                    return
                await self._send(pool, samples, begun_s, perf_counter())

        async with asyncio.TaskGroup() as group:
            for _ in range(self.plan.concurrency):
                group.create_task(caller())

    async def _open(
        self, pool: Pool, samples: Samples, begun_s: float, todo: Iterator[int], ends_s: float | None
    ) -> None:
        """Requests are sent at Poisson arrival times, however slow the responses are."""
        assert self.plan.rate is not None
        room = asyncio.Semaphore(IN_FLIGHT_MAX)
        # from a generator of its own: how far the times are ahead of the requests depends on the server
        due = arrivals(self.plan.rate, Random(f"arrivals {self.plan.seed}"))  # noqa: S311 - loads, not secrets

        async def one(due_s: float) -> None:
            try:
                await self._send(pool, samples, begun_s, due_s)
            finally:
                room.release()

        async with asyncio.TaskGroup() as group:
            for _, at in zip(todo, due, strict=False):
                due_s = begun_s + at
                if ends_s is not None and due_s >= ends_s:
                    return
                if (wait_s := due_s - perf_counter()) > 0:
                    await asyncio.sleep(wait_s)
                await room.acquire()
                group.create_task(one(due_s))

    async def _send(self, pool: Pool, samples: Samples, begun_s: float, due_s: float) -> None:
        """Send one request and wait for its complete response."""
        done: asyncio.Future[str | None] = asyncio.get_running_loop().create_future()

        def tell(code: str | None) -> None:
            if not done.done():
                done.set_result(code)

        content = body(self.plan, next(self._numbers), self._rng)
        answer = Answer(self.plan.stream, perf_counter, tell)
        sent_s = perf_counter()
        self.progress.in_flight += 1
        call = pool.call(request_bytes(self.plan, content), _Sink(answer))
        try:
            async with asyncio.timeout(self.plan.timeout_s):
                code = await done
        except TimeoutError:
            code = "client_timeout"
        finally:
            self.progress.in_flight -= 1
            _give_up(call, done)
        if code is None:
            samples.add(_sample(answer, begun_s, due_s, sent_s))
        else:
            samples.fail(code)


def _give_up(call: Call, done: "asyncio.Future[str | None]") -> None:
    """Close the connection of an abandoned call."""
    if not done.done() or done.cancelled() or done.result() is not None:
        call.cancel()


def _sample(answer: Answer, begun_s: float, due_s: float, sent_s: float) -> Sample:
    first_s, last_s = answer.first_s, answer.last_s
    return Sample(
        start_s=due_s - begun_s,
        lag_s=sent_s - due_s,
        ttft_s=float("nan") if first_s is None else first_s - due_s,
        decode_s=0.0 if first_s is None or last_s is None else last_s - first_s,
        latency_s=answer.ended_s - due_s,
        prompt_tokens=answer.prompt_tokens or 0,
        output_tokens=answer.pieces if answer.output_tokens is None else answer.output_tokens,
        counted=answer.output_tokens is None,
    )


class _Sink:
    """Forwards the events of a pool to an answer."""

    def __init__(self, answer: Answer) -> None:
        self.on_head = answer.on_head
        self.on_body = answer.on_body
        self.on_end = answer.on_end
        self._fail = answer.fail

    def on_error(self, error: CallError) -> None:
        """The connection failed."""
        self._fail(f"connection_{error.kind}")
