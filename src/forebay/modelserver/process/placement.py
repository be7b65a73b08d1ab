"""What a child is started with, and where: set before any library is imported, because their threads inherit it."""

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
"""Unless the server has been started with other values. Weights in huge pages, where the kernel allows it: a model
reads all of them for every batch, and with small pages that costs a few percent and leaves nothing in the TLB."""


@dataclass(frozen=True, slots=True)
class Placement:
    """Where an instance runs. Instances with equal placements may share a process and the weights in it."""

    cpus: tuple[int, ...] = ()
    """CPUs that it may run on; empty: as the server. Those that the machine lacks are left out."""
    numa_node: int = -1
    """Memory comes from this node where libnuma is installed; -1: from anywhere."""
    nice: int = 0
    """Added to the server's own niceness."""
    environment: tuple[tuple[str, str], ...] = ()
    """Set before any library is imported, such as OMP_NUM_THREADS."""
    gpus: tuple[str, ...] = ()
    """For CUDA_VISIBLE_DEVICES: indexes or UUIDs (of GPUs or MIG slices); empty: as the server."""


@dataclass(frozen=True, slots=True)
class ChildSpec:
    """One version of one model, and where its instances run."""

    backend: str
    config: ModelConfig
    folder: Path
    """That of the version."""
    instances: tuple[Placement, ...] = (Placement(),)
    rss_bytes_max: int = 0
    """A process with more memory of its own (resident, not shared, not of files) is replaced after its batch;
    0: any amount."""
    document: str = ""
    """The configuration as clients see it, JSON: for models that look at it."""


def as_argument(placement: Placement) -> str:
    """For the child's command line."""
    return msgspec.json.encode(placement).decode()


def environment(placement: Placement, inherited: Mapping[str, str]) -> dict[str, str]:
    """The child's environment."""
    gpus = {"CUDA_VISIBLE_DEVICES": ",".join(placement.gpus)} if placement.gpus else {}
    return {**DEFAULTS, **inherited, **gpus, **dict(placement.environment)}


def move(argument: str) -> None:
    """Move this process to where the argument says."""
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
    """Have this thread, and the processes that it starts, wait for a core while somebody else works there."""
    # Where they share a core, each request would otherwise stop the model in the middle of a batch, and find the
    # caches full of the model's data, and each batch would stop the reading of requests. In turns, more of both are
    # done at a time. Where a core is free, it makes no difference. A policy that somebody has chosen stays.
    with suppress(OSError, AttributeError):  # a sandbox may forbid it; not every system has it
        if os.sched_getscheduler(0) == os.SCHED_OTHER:
            os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))


def _prefer_node(node: int) -> None:
    try:
        numa = ctypes.CDLL("libnuma.so.1")
    except OSError:
        return  # not installed: memory still comes from the node of the CPU that first touches it
    if numa.numa_available() >= 0 and node <= numa.numa_max_node():
        numa.numa_set_preferred(node)
