"""Where instances run: the operator's host policies, NUMA nodes and GPUs."""

from pathlib import Path

import pytest

from forebay.core.serving.config import InstanceGroup, InstanceKind, ModelConfig
from forebay.modelserver.models.life.machine import node_cpus
from forebay.modelserver.models.life.placing import placements
from forebay.modelserver.models.options import Options
from forebay.modelserver.process.placement import Placement


@pytest.fixture
def sys(tmp_path: Path) -> Path:
    """A machine with two memory nodes, and one that has no CPUs."""
    for node, cpus in enumerate(("0-2,8\n", "4-6\n", "\n")):
        folder = tmp_path / f"devices/system/node/node{node}"
        folder.mkdir(parents=True)
        (folder / "cpulist").write_text(cpus)
    return tmp_path


def test_numa_node_cpus_are_read_from_sysfs(sys: Path) -> None:
    assert [node_cpus(node, sys) for node in range(4)] == [(0, 1, 2, 8), (4, 5, 6), (), ()]
    (sys / "devices/system/node/node0/cpulist").write_text("all of them")
    assert node_cpus(0, sys) == ()


def test_instances_run_on_the_numa_node_of_their_memory(sys: Path) -> None:
    hosts = {"near": Placement(numa_node=1), "named": Placement(numa_node=1, cpus=(0,))}
    groups = (
        InstanceGroup(count=2, host_policy="near"),
        InstanceGroup(host_policy="named"),
        InstanceGroup(host_policy="unknown"),
    )
    config = ModelConfig("m", "python", instances=groups)
    near = Placement(numa_node=1, cpus=(4, 5, 6))
    assert placements(config, Options(hosts=hosts), sys) == (near, near, hosts["named"], Placement())


def test_host_policy_maps_gpu_indices_to_names(sys: Path) -> None:
    hosts = {"slices": Placement(gpus=("MIG-a", "MIG-b"))}
    groups = (
        InstanceGroup(kind=InstanceKind.GPU, count=2, gpus=(1, 5), host_policy="slices"),
        InstanceGroup(kind=InstanceKind.GPU, gpus=(3,)),
        InstanceGroup(host_policy="slices"),
    )
    config = ModelConfig("m", "python", instances=groups)
    assert [placed.gpus for placed in placements(config, Options(hosts=hosts), sys)] == [
        ("MIG-b",), ("MIG-b",), ("5",), ("5",), ("3",), ("MIG-a", "MIG-b"),
    ]  # fmt: skip
    seen = Options(hosts=hosts, gpus=("GPU-a", "GPU-b", "GPU-c", "GPU-d"))
    assert [placed.gpus for placed in placements(config, seen, sys)][4:] == [("GPU-d",), ("MIG-a", "MIG-b")]
