"""Delays and deadlines, on virtual time: batches are dispatched in time, or requests are rejected."""

import asyncio
from collections.abc import Callable, Coroutine, Iterator, Sequence
from dataclasses import replace
from typing import Any

import pytest

from forebay.core.serving.batcher import TIMEOUT_EXPIRED
from forebay.core.serving.config import DynamicBatching, ModelConfig, QueuePolicy
from forebay.core.serving.values import InferRequest, InferResponse
from forebay.modelserver.models.running import batch_scheduler
from forebay.modelserver.models.running.batch_scheduler import TOO_LATE, BatchScheduler
from forebay.modelserver.models.running.call import Call
from forebay.modelserver.models.running.counting import Counts
from forebay.modelserver.models.running.execution import Executor
from forebay.modelserver.models.running.inputs import Checked
from forebay.modelserver.models.running.rate_limiting import InstanceResources
from forebay.modelserver.process.values import Answer, Done, Listener, Work
from forebay.sim.loop import run

pytestmark = pytest.mark.interpreted

RUN_S = 0.1
BATCHING = DynamicBatching(delay_s=60.0)


class Alarm:
    """`modelserver.alarm.Alarm` on the loop's own, virtual time."""

    def __init__(self, ring: Callable[[], None]) -> None:
        self._ring = ring
        self._timer: asyncio.TimerHandle | None = None

    def set(self, at: float) -> None:
        if self._timer is None or self._timer.cancelled() or at < self._timer.when():
            self.close()
            self._timer = asyncio.get_running_loop().call_at(at, self._rang)

    def close(self) -> None:
        if self._timer is not None:
            self._timer.cancel()

    def _rang(self) -> None:
        self._timer = None
        self._ring()


class Process:
    """A model process with one instance, whose batches take so long."""

    instances = 1

    def __init__(self) -> None:
        self.run_s = RUN_S
        self.sizes: list[int] = []
        self._busy = 0

    def usable(self, instance: int) -> bool:
        return self._busy < 2

    def alive(self, instance: int) -> bool:
        return True

    def outstanding(self, instance: int) -> int:
        return self._busy

    def execute(self, instance: int, works: Sequence[Work], listener: Listener) -> int:
        self._busy += 1
        self.sizes.append(len(works))
        asyncio.get_running_loop().call_later(self.run_s, self._end, len(works), listener)
        return len(self.sizes)

    def _end(self, size: int, listener: Listener) -> None:
        self._busy -= 1
        listener.on_done(Done((Answer(),) * size, 0, 0, int(self.run_s * 1e9), 0))


class Served:
    """One version of a model, whose requests are asked with what is left of their time."""

    def __init__(self, config: ModelConfig) -> None:
        self.process = Process()
        made: Any = self.process
        executor = Executor(config, "1", Counts("m", "1"), made, InstanceResources(None, lambda: None))
        self.queue = BatchScheduler(config, executor, 1)

    async def ask(
        self, within_s: float | None = None, timeout_s: float = 0.0, *, waited_s: float = 0.0
    ) -> tuple[str, float]:
        """What the request ends with, and after how long; it may have waited elsewhere before."""
        loop = asyncio.get_running_loop()
        began, ended = loop.time(), loop.create_future()
        request = InferRequest("m", "", "", (), timeout_us=int(timeout_s * 1e6))
        if within_s is not None:
            request.deadline = began + within_s

        def hear(response: InferResponse | None, final: bool) -> None:
            error = response.error if response is not None else None
            ended.set_result("ok" if error is None else f"{error.kind} {error.text}")

        call = Call(request, Checked(1, (), (), (), 0), hear)
        call.started_ns = call.queued_ns = int((began - waited_s) * 1e9)
        self.queue.submit(call)
        text: str = await ended
        return text, round(loop.time() - began, 3)


@pytest.fixture
def play(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[Coroutine[Any, Any, None]], None]]:
    monkeypatch.setattr(batch_scheduler, "monotonic", lambda: asyncio.get_running_loop().time())
    monkeypatch.setattr(batch_scheduler, "Alarm", Alarm)
    monkeypatch.setattr(batch_scheduler, "waited_s", lambda: 0.0)

    def play(main: Coroutine[Any, Any, None]) -> None:
        run(main, seconds_max=3600)

    return play


Play = Callable[[Coroutine[Any, Any, None]], None]


def config(**fields: Any) -> ModelConfig:
    return ModelConfig("m", "python", max_batch=4, batching=BATCHING, **fields)


def test_batch_is_dispatched_early_to_meet_its_deadlines(play: Play) -> None:
    async def main() -> None:
        served = Served(config())
        assert await served.ask() == ("ok", 60.1)
        both = await asyncio.gather(served.ask(), served.ask(2.0))
        assert both == [("ok", 1.995), ("ok", 1.995)]
        assert served.process.sizes == [1, 2]

    play(main())


def test_delay_includes_the_time_in_which_the_server_had_no_core(play: Play, monkeypatch: pytest.MonkeyPatch) -> None:
    async def main() -> None:
        served, waits = Served(config()), [20.0, 1.0, 2.0, 3.0]  # when requests are read or a batch ends
        monkeypatch.setattr(batch_scheduler, "waited_s", lambda: waits.pop(0))
        both = await asyncio.gather(served.ask(), served.ask())
        assert both == [("ok", 40.1), ("ok", 40.1)]  # read in one turn of the loop
        assert await served.ask() == ("ok", 58.1)
        assert not waits

    play(main())


def test_timeout_does_not_include_it(play: Play, monkeypatch: pytest.MonkeyPatch) -> None:
    async def main() -> None:
        monkeypatch.setattr(batch_scheduler, "waited_s", lambda: 1.5)
        batching = replace(BATCHING, default_policy=QueuePolicy(allow_override=True))
        served = Served(replace(config(), batching=batching))
        assert await served.ask(timeout_s=2.0) == (f"UNAVAILABLE {TIMEOUT_EXPIRED}", 2.0)

    play(main())


def test_a_request_that_cannot_meet_its_deadline_is_rejected_at_once(play: Play) -> None:
    async def main() -> None:
        served = Served(config())
        await served.ask()
        text, after_s = await served.ask(0.05)
        assert text.startswith("DEADLINE_EXCEEDED ")
        assert text.endswith(f"{TOO_LATE}: 50 ms are left, and a batch takes 100 ms")
        assert after_s == 0
        full = [served.ask(1.0) for _ in range(5)]
        served.process.run_s = 0.7
        *first, last = await asyncio.gather(*full)
        assert first == [("ok", 0.7)] * 4
        assert TOO_LATE in last[0]
        assert last[1] < 0.95
        assert served.process.sizes == [1, 4]

    play(main())


def test_estimate_recovers_after_one_slow_batch(play: Play) -> None:
    async def main() -> None:
        served = Served(config())
        served.process.run_s = 30.0
        assert (await served.ask())[0] == "ok"
        served.process.run_s = RUN_S
        tries = 0
        while (await served.ask(1.0))[0] != "ok":
            tries += 1
        assert 10 < tries < 50
        assert (await served.ask(9.0))[0] == "ok"

    play(main())


def test_timeout_is_a_deadline_when_the_model_sets_deadlines(play: Play) -> None:
    async def main() -> None:
        plain = Served(config())
        assert await plain.ask(timeout_s=2.0) == ("ok", 60.1)
        served = Served(config(parameters={"forebay.deadlines": "true"}))
        assert await served.ask(timeout_s=2.0) == ("ok", 2.095)
        assert await served.ask(timeout_s=2.0) == ("ok", 1.995)
        assert (await served.ask(1.0, timeout_s=2.0))[1] == 0.995
        assert (await served.ask(3.0, timeout_s=2.0))[1] == 1.995
        text, after_s = await served.ask(timeout_s=0.02)
        assert text.endswith(f"{TOO_LATE}: 20 ms are left, and a batch takes 100 ms")
        assert after_s == 0

    play(main())


def test_timeout_includes_time_spent_in_earlier_queues(play: Play) -> None:
    async def main() -> None:
        batching = replace(BATCHING, default_policy=QueuePolicy(allow_override=True))
        served = Served(replace(config(), batching=batching))
        text, after_s = await served.ask(timeout_s=2.0, waited_s=1.5)
        assert (text, after_s) == (f"UNAVAILABLE {TIMEOUT_EXPIRED}", 0.5)

    play(main())
