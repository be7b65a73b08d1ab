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
    test_dead_unit_is_observed_with_reason_and_last_output_until_removed,
    test_generation_cannot_be_placed_twice,
    test_placed_unit_is_observed_with_its_slot_and_endpoint,
    test_remove_of_an_unknown_unit_does_nothing,
    test_remove_with_grace_terminates_and_is_idempotent,
    test_unit_ignoring_termination_is_killed_after_the_grace_period,
    test_unit_that_never_listens_has_no_endpoint,
)
from tests.control.units import replica

from forebay.core.model import Endpoint, WorkerSpec
from forebay.providers.protocol import Provider, ProviderError
from forebay.sim.full.event_log import EventLog
from forebay.sim.full.machine import ExitError, Machine, MachineProvider, Process
from forebay.sim.loop import run
from forebay.sim.network.network import Network

__all__ = [
    "test_dead_unit_is_observed_with_reason_and_last_output_until_removed",
    "test_generation_cannot_be_placed_twice",
    "test_placed_unit_is_observed_with_its_slot_and_endpoint",
    "test_remove_of_an_unknown_unit_does_nothing",
    "test_remove_with_grace_terminates_and_is_idempotent",
    "test_unit_ignoring_termination_is_killed_after_the_grace_period",
    "test_unit_that_never_listens_has_no_endpoint",
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


def test_provider_that_cannot_observe_raises_and_must_not_act(tmp_path: Path) -> None:
    async def test(machine: Machine, provider: MachineProvider, event_log: EventLog) -> None:
        machine.unreachable = "nobody answers"
        with pytest.raises(ProviderError, match="nobody answers"):
            await provider.observe()
        await provider.remove("chat-0", 1, 0.0)
        assert event_log.violations

    on_a_machine(tmp_path, test)


def test_failed_unit_start_raises_with_the_reason(tmp_path: Path) -> None:
    async def test(machine: Machine, provider: MachineProvider, event_log: EventLog) -> None:
        await provider.observe()
        machine.refuses = "no room"
        with pytest.raises(ProviderError, match="no room"):
            await provider.place(replica(), 1)
        assert not machine.processes

    on_a_machine(tmp_path, test)
