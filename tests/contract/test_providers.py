"""The provider contract over every adapter."""

import asyncio
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from tests.control.fakes.provider import MemoryProvider, Script
from tests.control.units import kill_all, local, replica, seen, wait_for

from forebay.core.model import WorkerSpec
from forebay.core.reconcile import Slot
from forebay.providers.protocol import Provider, ProviderError

WORDS = "cannot go on: the moon is full"
SCRIPTS = {
    "well": Script(),
    "dies": Script(dies="ended with exit code 1", last_words=WORDS),
    "deaf": Script(listens=False),
    "stubborn": Script(obeys=False),
}
Case = Callable[[Callable[[Provider], Awaitable[None]]], None]


def _script(slot: Slot, generation: int) -> Script:
    assert isinstance(slot.spec, WorkerSpec)
    return SCRIPTS[str(slot.spec.settings["behave"])]


@pytest.fixture(params=["memory", "local"])
def provided(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Case]:
    """Runs a test with a provider, in a loop; nothing it started is left."""

    def case(test: Callable[[Provider], Awaitable[None]]) -> None:
        async def run() -> None:
            provider: Provider = MemoryProvider(_script) if request.param == "memory" else local(tmp_path)
            try:
                await asyncio.wait_for(test(provider), 30)
            finally:
                provider.close()

        asyncio.run(run())

    yield case
    kill_all(tmp_path)


def test_placed_unit_is_observed_with_its_slot_and_endpoint(provided: Case) -> None:
    async def test(provider: Provider) -> None:
        assert await provider.observe() == ()
        await provider.place(replica("chat-0", digest="abc", grace_s=7.0), 3)

        at_once = await seen(provider, "chat-0", 3)
        assert at_once
        assert at_once.alive
        unit = await wait_for(provider, "chat-0", lambda u: u.endpoint, 3)
        assert (unit.slot, unit.generation, unit.digest, unit.drain_grace_s) == ("chat-0", 3, "abc", 7.0)
        assert unit.endpoint
        assert unit.endpoint.pid == unit.pid

    provided(test)


def test_placed_unit_is_observed_with_its_placement(provided: Case) -> None:
    async def test(provider: Provider) -> None:
        slot = replica()
        assert isinstance(slot.spec, WorkerSpec)
        spec = replace(slot.spec, node="node-a", devices=("GPU-1", "GPU-2"), cpus=(0,))
        await provider.place(replace(slot, spec=spec, memory_bytes=5, device_bytes=7), 1)
        unit = await wait_for(provider, "chat-0", lambda u: u.alive)
        assert (unit.node, unit.devices, unit.cpus) == ("node-a", ("GPU-1", "GPU-2"), (0,))
        assert (unit.memory_bytes, unit.device_bytes) == (5, 7)

    provided(test)


def test_unit_that_never_listens_has_no_endpoint(provided: Case) -> None:
    async def test(provider: Provider) -> None:
        await provider.place(replica(behave="deaf"), 1)
        unit = await wait_for(provider, "chat-0", lambda u: u.alive)
        assert unit.endpoint is None

    provided(test)


def test_dead_unit_is_observed_with_reason_and_last_output_until_removed(provided: Case) -> None:
    async def test(provider: Provider) -> None:
        await provider.place(replica(behave="dies"), 1)
        async with asyncio.timeout(15):
            await provider.changed()
        unit = await wait_for(provider, "chat-0", lambda u: not u.alive)
        assert "exit code 1" in unit.ended
        assert WORDS in unit.last_words

        await provider.remove("chat-0", 1, 5.0)
        assert await seen(provider, "chat-0")
        await provider.remove("chat-0", 1, 0.0)
        assert await seen(provider, "chat-0") is None

    provided(test)


def test_remove_with_grace_terminates_and_is_idempotent(provided: Case) -> None:
    async def test(provider: Provider) -> None:
        await provider.place(replica(), 1)
        await wait_for(provider, "chat-0", lambda u: u.endpoint)
        await provider.remove("chat-0", 1, 5.0)
        await provider.remove("chat-0", 1, 4.0)
        unit = await wait_for(provider, "chat-0", lambda u: not u.alive)
        assert "exit code 0" in unit.ended
        assert unit.endpoint is None

    provided(test)


def test_unit_ignoring_termination_is_killed_after_the_grace_period(provided: Case) -> None:
    async def test(provider: Provider) -> None:
        await provider.place(replica(behave="stubborn"), 1)
        await wait_for(provider, "chat-0", lambda u: u.endpoint)
        await provider.remove("chat-0", 1, 5.0)
        unit = await seen(provider, "chat-0")
        assert unit
        assert unit.alive
        await provider.remove("chat-0", 1, 0.0)
        unit = await wait_for(provider, "chat-0", lambda u: not u.alive)
        assert "SIGKILL" in unit.ended

    provided(test)


def test_generation_cannot_be_placed_twice(provided: Case) -> None:
    async def test(provider: Provider) -> None:
        await provider.place(replica(), 1)
        with pytest.raises(ProviderError, match="exists already"):
            await provider.place(replica(), 1)
        await provider.place(replica(), 2)
        assert [u.key for u in await provider.observe()] == [("chat-0", 1), ("chat-0", 2)]

    provided(test)


def test_remove_of_an_unknown_unit_does_nothing(provided: Case) -> None:
    async def test(provider: Provider) -> None:
        await provider.remove("chat-0", 1, 0.0)
        await provider.remove("chat-0", 1, 5.0)
        assert await provider.observe() == ()

    provided(test)


def test_failed_observation_is_an_error_not_an_empty_list(provided: Case, tmp_path: Path) -> None:
    async def test(provider: Provider) -> None:
        if isinstance(provider, MemoryProvider):
            provider.unreachable = "the network is down"
        else:
            (tmp_path / "units").write_text("in the way")
        with pytest.raises(ProviderError):
            await provider.observe()

    provided(test)


def test_failed_start_is_an_error_with_the_reason(tmp_path: Path) -> None:
    async def test() -> None:
        memory = MemoryProvider(lambda slot, generation: Script(refuse="no room"))
        with pytest.raises(ProviderError, match="no room"):
            await memory.place(replica(), 1)
        (tmp_path / "units").write_text("in the way")
        provider = local(tmp_path)
        with pytest.raises(ProviderError, match=r"in the way|exists|directory"):
            await provider.place(replica(), 1)
        provider.close()

    asyncio.run(test())
