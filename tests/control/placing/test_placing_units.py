"""Two nodes of one machine, for real: cores, launchers, and units of a drained node."""

import asyncio
import os
import shutil
import subprocess
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from tests.control.fakes.provider import MemoryProvider
from tests.control.rig import controlled, plan
from tests.control.units import kill_all, local, replica, seen, wait_for

from forebay.control.placing.placer import Placer
from forebay.control.plan import Plan
from forebay.core.health.values import Excluded
from forebay.core.model import ReplicaState, WorkerSpec
from forebay.core.placement.memory import Footprint
from forebay.core.placement.settings import NodeSettings
from forebay.core.placement.values import GIB
from forebay.core.reconcile import Slot
from forebay.providers import launching
from forebay.providers.footprint import used_bytes
from forebay.providers.local import LocalProvider
from forebay.providers.machine import Machine, this_machine
from forebay.providers.protocol import ProviderError

CPU = min(os.sched_getaffinity(0))
PATH = {"PATH": os.environ["PATH"]}
NODES = (
    NodeSettings(name="a", cpus=str(CPU), memory_gib=4, launcher=("nice", "-n", "5")),
    NodeSettings(name="b", memory_gib=4),
)


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Path]:
    yield tmp_path
    kill_all(tmp_path)


def run(test: Callable[[], Awaitable[None]]) -> None:
    asyncio.run(asyncio.wait_for(test(), 30))


def placer(excluded: Callable[[], Excluded] = Excluded) -> Placer:
    return Placer(Machine((0, 1), 8 * GIB), lambda *_: Footprint(0, 0, 3 * GIB), excluded)


def on_nodes(folder: Path, *slots: Slot) -> Plan:
    return replace(plan(folder, *slots, with_gateway=False), nodes=NODES)


def placed(slot: Slot, *launcher: str, devices: tuple[str, ...] = (), cpus: tuple[int, ...] = ()) -> Slot:
    assert isinstance(slot.spec, WorkerSpec)
    return replace(slot, spec=replace(slot.spec, node="a", devices=devices, cpus=cpus), launcher=launcher)


def with_provider(folder: Path, test: Callable[[LocalProvider], Awaitable[None]]) -> None:
    async def whole() -> None:
        provider = local(folder, PATH)
        try:
            await test(provider)
        finally:
            provider.close()

    run(whole)


def test_replicas_use_the_cores_and_launcher_of_their_node(folder: Path) -> None:
    async def test() -> None:
        provider = local(folder, PATH)
        async with controlled(
            folder, on_nodes(folder, replica("m-0"), replica("m-1")), provider, placer=placer()
        ) as rig:
            await rig.until(lambda: all(r.state is ReplicaState.READY for r in rig.status().models[0].replicas))
            units = {unit.node: unit for unit in await provider.observe()}
            assert sorted(units) == ["a", "b"]
            status = Path(f"/proc/{units['a'].pid}/status").read_text()
            assert f"Cpus_allowed_list:\t{CPU}\n" in status
            own = os.getpriority(os.PRIO_PROCESS, 0)
            assert os.getpriority(os.PRIO_PROCESS, units["a"].pid) == min(own + 5, 19)  # there is no nicer one
            assert os.sched_getaffinity(units["b"].pid) == os.sched_getaffinity(0)

    run(test)


def test_units_leave_a_drained_node_and_do_not_return_by_themselves(folder: Path) -> None:
    async def test() -> None:
        excluded = {"now": Excluded()}
        provider = MemoryProvider()
        wanted = on_nodes(folder, replica("m-0"))
        async with controlled(folder, wanted, provider, placer=placer(lambda: excluded["now"])) as rig:
            await rig.until(lambda: provider_node(rig.control.units) == {"a"})
            excluded["now"] = Excluded(nodes={"a": "drained"})
            await rig.until(lambda: provider_node(rig.control.units) == {"b"})
            assert "moves: a is drained" in [event.why for event in rig.events("m-0")]
            excluded["now"] = Excluded()
            await rig.control.look()
            assert provider_node(rig.control.units) == {"b"}

    run(test)


def provider_node(units: object) -> set[str]:
    assert isinstance(units, dict)
    return {unit.node for unit in units.values() if unit.alive}


def test_unplaceable_replica_waits_with_the_reason(folder: Path) -> None:
    async def test() -> None:
        excluded = {"now": Excluded(nodes={"b": "drained"})}
        wanted = on_nodes(folder, replica("m-0"), replica("m-1"))
        async with controlled(folder, wanted, MemoryProvider(), placer=placer(lambda: excluded["now"])) as rig:
            waits = "fits nowhere: a has 1 GiB of memory free of 4, 3 needed; b is drained"
            await rig.until(lambda: rig.replica("m-1").why == waits)
            assert rig.replica("m-0").generation == 1
            assert rig.replica("m-1").generation == 0
            excluded["now"] = Excluded()
            await rig.until(lambda: rig.replica("m-1").generation == 1)

    run(test)


def test_placement_error_leaves_running_units_alone(folder: Path) -> None:
    async def test() -> None:
        excluded = {"now": Excluded()}
        wanted = on_nodes(folder, replica("m-0"))
        async with controlled(folder, wanted, MemoryProvider(), placer=placer(lambda: excluded["now"])) as rig:
            await rig.until(lambda: rig.replica("m-0").generation == 1)
            del excluded["now"]
            await rig.until(lambda: "KeyError" in rig.control.trouble)
            assert rig.replica("m-0").generation == 1
            excluded["now"] = Excluded()
            await rig.until(lambda: not rig.control.trouble)

    run(test)


def test_missing_launcher_is_reported_and_starts_nothing(folder: Path) -> None:
    async def test(provider: LocalProvider) -> None:
        with pytest.raises(ProviderError, match=r"the launcher `no-such-program` is not in .*: see `launcher`"):
            await provider.place(placed(replica(), "no-such-program", "-x"), 1)
        unit = await seen(provider, "chat-0")
        assert unit is not None
        assert not unit.alive

    with_provider(folder, test)


def test_launcher_that_does_not_exec_is_killed_and_reported(folder: Path) -> None:
    async def test(provider: LocalProvider) -> None:
        await provider.place(placed(replica(), "sh", "-c", '"$@"; true', "sh"), 1)
        unit = await wait_for(provider, "chat-0", lambda u: not u.alive)
        assert "`sh` stayed before it as a process of its own: a launcher has to exec" in unit.ended

    with_provider(folder, test)


def test_a_unit_sees_its_devices_and_no_others(folder: Path) -> None:
    async def test(provider: LocalProvider) -> None:
        await provider.place(placed(replica("m-0"), devices=("GPU-1", "GPU-7")), 1)
        await provider.place(replica("m-1"), 1)
        environments = []
        for slot in ("m-0", "m-1"):
            unit = await wait_for(provider, slot, lambda u: u.endpoint)
            environments.append(Path(f"/proc/{unit.pid}/environ").read_bytes().split(b"\0"))
        assert b"CUDA_VISIBLE_DEVICES=GPU-1,GPU-7" in environments[0]
        assert b"NVIDIA_VISIBLE_DEVICES=GPU-1,GPU-7" in environments[0]
        assert not [each for each in environments[1] if b"VISIBLE_DEVICES" in each]

    with_provider(folder, test)


def test_missing_cores_are_reported_and_own_affinity_is_kept(folder: Path) -> None:
    async def test(provider: LocalProvider) -> None:
        before = os.sched_getaffinity(0)
        with pytest.raises(ProviderError, match="cores 4000,4001 cannot be used: Invalid argument; see `cpus`"):
            await provider.place(placed(replica(), cpus=(4000, 4001)), 1)
        assert os.sched_getaffinity(0) == before

    with_provider(folder, test)


@pytest.mark.skipif(shutil.which("ip") is None or os.geteuid() != 0, reason="needs root and iproute2")
def test_launcher_can_be_a_network_namespace(folder: Path) -> None:
    async def test(provider: LocalProvider) -> None:
        name = f"forebay-test-{os.getpid()}"
        if os.system(f"ip netns add {name} && ip -n {name} link set lo up") != 0:
            pytest.skip("network namespaces cannot be made here")
        try:
            await provider.place(placed(replica(), "ip", "netns", "exec", name), 1)
            unit = await wait_for(provider, "chat-0", lambda u: u.endpoint)
            assert os.readlink(f"/proc/{unit.pid}/ns/net") != os.readlink("/proc/self/ns/net")
            await provider.remove("chat-0", 1, 0.0)
            await wait_for(provider, "chat-0", lambda u: not u.alive)
        finally:
            os.system(f"ip netns delete {name}")

    with_provider(folder, test)


def test_machine_is_read_from_proc_and_sysfs(tmp_path: Path) -> None:
    here = this_machine()
    assert here.cpus == tuple(sorted(os.sched_getaffinity(0)))
    assert here.memory_bytes > GIB / 2
    (tmp_path / "proc").mkdir()
    (tmp_path / "proc/meminfo").write_text("MemTotal:       8388608 kB\nMemFree: 1 kB\n")
    (tmp_path / "sys/fs/cgroup").mkdir(parents=True)
    (tmp_path / "sys/fs/cgroup/memory.max").write_text("4294967296\n")
    for number, cores in enumerate((f"{CPU}", "4000-4010")):
        node = tmp_path / f"sys/devices/system/node/node{number}"
        node.mkdir(parents=True)
        (node / "cpulist").write_text(cores + "\n")
    assert this_machine(tmp_path) == Machine(here.cpus, 4 * GIB, ((CPU,), ()))
    (tmp_path / "sys/fs/cgroup/memory.max").write_text("max\n")
    assert this_machine(tmp_path).memory_bytes == 8 * GIB
    assert this_machine(tmp_path / "nothing") == Machine(here.cpus, 0, ())


def test_used_bytes_includes_child_processes() -> None:
    child = subprocess.Popen(["sleep", "60"])
    try:
        found = used_bytes([os.getpid(), child.pid, 2**22 + 1])
    finally:
        child.kill()
        child.wait()
    assert set(found) == {os.getpid(), child.pid}
    assert found[os.getpid()] > found[child.pid] > 0


def test_launcher_is_resolved_through_path(tmp_path: Path) -> None:
    program = tmp_path / "wrap"
    program.write_text("#!/bin/sh\n")
    program.chmod(0o755)
    assert launching.found_launcher((), None) == []
    assert launching.found_launcher(("wrap", "-x"), str(tmp_path)) == [str(program), "-x"]
