"""Load per model from the counters of gateways: nothing twice, nothing lost, nothing invented."""

import asyncio
from collections.abc import Iterable

from forebay.control.scaling.collecting import Collected, Collector
from forebay.core.pressure import Pressure, TrafficCounters
from forebay.core.reconcile import ObservedUnit
from forebay.sim.loop import run


class FakeGateways:
    """Gateways that report what is in `now`."""

    def __init__(self) -> None:
        self.now: dict[str, Pressure] = {}

    def tell(self, slot: str, arrivals: int, *, instance: str = "a", age_s: float = 1e6, model: str = "chat") -> None:
        self.now[slot] = Pressure(instance, age_s, {model: TrafficCounters(arrivals=arrivals, waiting=arrivals)})

    async def pressures(self, units: Iterable[ObservedUnit]) -> dict[str, Pressure]:
        return dict(self.now)


async def collect_at_next_poll(collector: Collector, told: FakeGateways, *gateways: str) -> Collected | None:
    await asyncio.sleep(1.0)
    return await collector.collect(told, (), gateways or ("g0",))


def arrivals_of(found: Collected | None) -> dict[str, int] | None:
    return None if found is None else {name: each.arrivals for name, each in found.models.items()}


def test_collector_reports_differences_between_polls() -> None:
    async def story() -> None:
        collector, told = Collector(), FakeGateways()
        told.tell("g0", 100)
        assert await collect_at_next_poll(collector, told) is None
        told.tell("g0", 107)
        found = await collect_at_next_poll(collector, told)
        assert arrivals_of(found) == {"chat": 7}
        assert found is not None
        assert found.since_s == 1.0
        assert found.models["chat"].waiting == 107

    run(story(), seconds_max=100.0)


def test_missing_gateway_response_makes_the_poll_unknown_and_loses_no_counts() -> None:
    async def story() -> None:
        collector, told = Collector(), FakeGateways()
        told.tell("g0", 1)
        told.tell("g1", 1)
        assert await collect_at_next_poll(collector, told, "g0", "g1") is None
        silent = told.now.pop("g1")
        told.tell("g0", 5)
        assert await collect_at_next_poll(collector, told, "g0", "g1") is None
        told.now["g1"] = silent
        told.tell("g0", 9)
        found = await collect_at_next_poll(collector, told, "g0", "g1")
        assert (arrivals_of(found), found and found.since_s) == ({"chat": 8}, 2.0)

    run(story(), seconds_max=100.0)


def test_new_gateway_counts_from_zero_and_unknown_old_one_from_now() -> None:
    async def story() -> None:
        collector, told = Collector(), FakeGateways()
        told.tell("g0", 50)
        await collect_at_next_poll(collector, told)
        told.tell("g0", 3, instance="b", age_s=0.5)
        assert arrivals_of(await collect_at_next_poll(collector, told)) == {"chat": 3}
        told.tell("g0", 900, instance="c", age_s=3600.0)
        assert arrivals_of(await collect_at_next_poll(collector, told)) == {"chat": 0}

    run(story(), seconds_max=100.0)


def test_removed_gateway_is_no_longer_counted() -> None:
    async def story() -> None:
        collector, told = Collector(), FakeGateways()
        told.tell("g0", 5)
        told.tell("g1", 5)
        await collect_at_next_poll(collector, told, "g0", "g1")
        del told.now["g1"]
        told.tell("g0", 6)
        assert arrivals_of(await collect_at_next_poll(collector, told, "g0")) == {"chat": 1}

    run(story(), seconds_max=100.0)


def test_model_missing_from_one_gateway_is_unknown() -> None:
    async def story() -> None:
        collector, told = Collector(), FakeGateways()
        told.tell("g0", 5)
        told.tell("g1", 5, model="other")
        await collect_at_next_poll(collector, told, "g0", "g1")
        assert arrivals_of(await collect_at_next_poll(collector, told, "g0", "g1")) == {}
        assert arrivals_of(await collect_at_next_poll(collector, told, "g1")) == {"other": 0}

    run(story(), seconds_max=100.0)


def test_without_gateways_nothing_is_known() -> None:
    async def story() -> None:
        collector = Collector()
        assert await collector.collect(FakeGateways(), (), ()) is None

    run(story(), seconds_max=100.0)
