"""The simulated machine is a provider like any other: the same contract, on virtual time."""

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path
from random import Random

import msgspec
import pytest
from tests.contract.test_providers import (
    WORDS,
    Case,
    test_a_placed_unit_is_seen_as_what_it_was_placed_as,
    test_a_unit_that_dies_is_told_with_how_and_its_last_words_until_it_is_removed,
    test_a_unit_that_does_not_obey_is_killed_when_the_grace_is_over,
    test_a_unit_that_is_asked_finishes_and_asking_again_does_no_harm,
    test_a_unit_that_never_listens_is_alive_without_an_endpoint,
    test_removing_what_does_not_exist_does_nothing,
    test_the_same_generation_is_never_placed_twice,
)
from tests.control.units import replica

from forebay.core.model import Endpoint, WorkerSpec
from forebay.providers.protocol import Provider, ProviderError
from forebay.sim.full.event_log import EventLog
from forebay.sim.full.machine import ExitError, Machine, MachineProvider, Process
from forebay.sim.loop import run
from forebay.sim.network.network import Network

__all__ = [
    "test_a_placed_unit_is_seen_as_what_it_was_placed_as",
    "test_a_unit_that_dies_is_told_with_how_and_its_last_words_until_it_is_removed",
    "test_a_unit_that_does_not_obey_is_killed_when_the_grace_is_over",
    "test_a_unit_that_is_asked_finishes_and_asking_again_does_no_harm",
    "test_a_unit_that_never_listens_is_alive_without_an_endpoint",
    "test_removing_what_does_not_exist_does_nothing",
    "test_the_same_generation_is_never_placed_twice",
]
Test = Callable[[Provider], Awaitable[None]]
MachineTest = Callable[[Machine, MachineProvider, EventLog], Awaitable[None]]


async def _main(process: Process) -> None:
    spec = process.spec
    assert isinstance(spec, WorkerSpec)
    behave = spec.settings["behave"]
    if behave == "dies":
        raise ExitError(WORDS)
    if behave != "deaf":
        endpoint = Endpoint(process.pid, "127.0.0.1", 8100)
        process.endpoint_path.write_bytes(msgspec.json.encode(endpoint))
    asked = asyncio.Event()
    process.signal = asked.set
    await asked.wait()
    if behave == "stubborn":
        await asyncio.Event().wait()


def on_a_machine(folder: Path, test: MachineTest) -> None:
    network = Network(Random(1))

    async def main() -> None:
        event_log = EventLog(asyncio.get_running_loop().time)
        async with asyncio.TaskGroup() as group:
            machine = Machine(network, group, folder, event_log, _main)
            provider = MachineProvider(machine, event_log)
            await test(machine, provider, event_log)
            provider.close()
            for process in machine.alive:
                machine.kill(process)

    run(main(), seconds_max=100.0, network=network)


@pytest.fixture
def provided(tmp_path: Path) -> Case:
    """Runs a test of the contract with a provider of the machine."""

    def case(test: Test) -> None:
        async def known(machine: Machine, provider: MachineProvider, event_log: EventLog) -> None:
            await provider.observe()
            await asyncio.wait_for(test(provider), 30)
            assert not event_log.violations

        on_a_machine(tmp_path, known)

    return case


def test_a_provider_that_cannot_observe_says_so_and_must_not_act(tmp_path: Path) -> None:
    async def test(machine: Machine, provider: MachineProvider, event_log: EventLog) -> None:
        machine.unreachable = "nobody answers"
        with pytest.raises(ProviderError, match="nobody answers"):
            await provider.observe()
        await provider.remove("chat-0", 1, 0.0)
        assert event_log.violations

    on_a_machine(tmp_path, test)


def test_a_unit_that_cannot_be_started_is_an_error_with_the_reason(tmp_path: Path) -> None:
    async def test(machine: Machine, provider: MachineProvider, event_log: EventLog) -> None:
        await provider.observe()
        machine.refuses = "no room"
        with pytest.raises(ProviderError, match="no room"):
            await provider.place(replica(), 1)
        assert not machine.processes

    on_a_machine(tmp_path, test)
