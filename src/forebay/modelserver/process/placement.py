"""Placement and environment of a child, set before any library is imported because their threads inherit it."""

import ctypes
import os
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import msgspec

from forebay.core.serving.config import ModelConfig

DEFAULTS: Final = {"GLIBC_TUNABLES": "glibc.malloc.hugetlb=1"}
"""Defaults for variables not set at the server. Weights in huge pages where the kernel allows it: a model reads all
of them for every batch, and small pages cost a few percent and thrash the TLB.
"""


@dataclass(frozen=True, slots=True)
class Placement:
    """Where an instance runs. Instances with equal placements may share a process and its weights."""

    cpus: tuple[int, ...] = ()
    """CPUs that it may run on; empty: as the server. CPUs that the machine lacks are ignored."""
    numa_node: int = -1
    """Preferred NUMA node for memory, if libnuma is installed; -1: any."""
    nice: int = 0
    """Added to the server's own niceness."""
    environment: tuple[tuple[str, str], ...] = ()
    """Set before any library is imported; OMP_NUM_THREADS, for example."""
    gpus: tuple[str, ...] = ()
    """For CUDA_VISIBLE_DEVICES: indexes or UUIDs (of GPUs or MIG slices); empty: as the server."""


@dataclass(frozen=True, slots=True)
class ChildSpec:
    """One version of one model, and the placement of its instances."""

    backend: str
    config: ModelConfig
    folder: Path
    """Folder of the version."""
    instances: tuple[Placement, ...] = (Placement(),)
    rss_bytes_max: int = 0
    """A process with more private anonymous memory is replaced after its batch; 0: no limit."""
    document: str = ""
    """The configuration document that clients see, as JSON, for models that read it."""
    steps: "tuple[ChildSpec, ...]" = ()
    """For an ensemble that runs in processes of its own: the models of its steps, in their order."""


def as_argument(placement: Placement) -> str:
    """Encode for the child's command line."""
    return msgspec.json.encode(placement).decode()


def environment(placement: Placement, inherited: Mapping[str, str]) -> dict[str, str]:
    """The child's environment."""
    gpus = {"CUDA_VISIBLE_DEVICES": ",".join(placement.gpus)} if placement.gpus else {}
    return {**DEFAULTS, **inherited, **gpus, **dict(placement.environment)}


def move(argument: str) -> None:
    """Apply an encoded placement to this process."""
    placement = msgspec.json.decode(argument, type=Placement)
    cpus = set(placement.cpus) & os.sched_getaffinity(0)
    if cpus:
        os.sched_setaffinity(0, cpus)
    if placement.nice:
        with suppress(PermissionError):
            os.nice(placement.nice)
    if placement.numa_node >= 0:
        _prefer_node(placement.numa_node)


def take_turns() -> None:
    """Have this thread, and processes that it starts, wait for a busy core instead of preempting (SCHED_BATCH)."""
    # On a shared core, requests would otherwise preempt a running batch and find caches full of the model's data, and
    # batches would preempt request handling. Taking turns raises the throughput of both. On a free core it makes no
    # difference. A policy set by the operator is kept.
    with suppress(OSError, AttributeError):  # a sandbox may forbid it, and not every system has it
        if os.sched_getscheduler(0) == os.SCHED_OTHER:
            os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))


def _prefer_node(node: int) -> None:
    try:
        numa = ctypes.CDLL("libnuma.so.1")
    except OSError:
        return  # not installed: memory still comes from the node of the CPU that first touches it
    if numa.numa_available() >= 0 and node <= numa.numa_max_node():
        numa.numa_set_preferred(node)
