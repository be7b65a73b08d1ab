"""Where a child runs: what has to be set before any library is imported, because their threads inherit it."""

import ctypes
import os
from collections.abc import Mapping
from contextlib import suppress
from typing import Final

import msgspec

from forebay.modelserver.process.values import Placement

DEFAULTS: Final = {"GLIBC_TUNABLES": "glibc.malloc.hugetlb=1"}
"""Unless the server has been started with other values. Weights in huge pages, where the kernel allows it: a model
reads all of them for every batch, and with small pages that costs a few percent and leaves nothing in the TLB."""


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


def _prefer_node(node: int) -> None:
    try:
        numa = ctypes.CDLL("libnuma.so.1")
    except OSError:
        return  # not installed: memory still comes from the node of the CPU that first touches it
    if numa.numa_available() >= 0 and node <= numa.numa_max_node():
        numa.numa_set_preferred(node)
