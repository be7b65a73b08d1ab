"""Operator settings of the model server."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path

from forebay.core.serving.limiter import Amount
from forebay.modelserver.process.placement import Placement
from forebay.modelserver.repository import Rules


class Control(StrEnum):
    """Which models of the repository are served; Triton's `--model-control-mode`."""

    NONE = "none"
    """All models that exist at startup."""
    POLL = "poll"
    """All models; the repository is polled for changes."""
    EXPLICIT = "explicit"
    """Models named at startup, and those loaded and unloaded on request."""


@dataclass(frozen=True, slots=True)
class Options:
    """Settings of the model server, with a limit for every queue, size and time."""

    repositories: tuple[Path, ...] = ()
    control: Control = Control.NONE
    linked: tuple[Path, ...] = ()
    """Folders outside the repositories that links in them may lead to."""
    startup: tuple[str, ...] = ()
    """EXPLICIT: models to load at startup; `*` alone loads all."""
    poll_s: float = 15.0
    strict_readiness: bool = True
    """True: the server is ready only if every model is. False: as soon as startup is over."""
    rules: Rules = field(default_factory=Rules)
    queue_max: int = 10_000
    """Requests in flight per model version, queued and running; more are rejected (UNAVAILABLE)."""
    held_bytes_max: int = 2 * 2**30
    """Total input bytes of those requests; a single request may exceed it."""
    strings_max: int = 1_000_000
    """Elements of one BYTES tensor; each is validated."""
    hang_s: float = 60.0
    """A batch that takes longer counts as hung, and its process is replaced."""
    load_timeout_s: float = 600.0
    drain_s: float = 30.0
    """How long a version that is unloaded or replaced may finish its requests."""
    loads_max: int = 4
    """Models that load concurrently."""
    cache_bytes: int = 0
    """Size of the response cache; 0: no cache."""
    memory_bytes: int = 0
    """Memory budget of all loaded models; the least recently used are put to sleep. 0: no budget."""
    room_wait_s: float = 30.0
    """How long requests wait for memory that busy models hold; loads wait for `load_timeout_s`."""
    turn_s: float = 10.0
    """How long a busy model keeps its memory when others wait for it."""
    measure_s: float = 5.0
    """Interval at which the memory of recently used models is measured."""
    pinned: frozenset[str] = frozenset()
    """Models that are never put to sleep."""
    rss_bytes_max: int = 0
    """A model process whose resident memory exceeds this is replaced; 0: no limit."""
    limited: bool = False
    """Instances wait for the resources they declare (Triton's `--rate-limit=execution_count`)."""
    amounts: tuple[Amount, ...] = ()
    """Available resources; for a resource not listed, as much as the most demanding instance needs."""
    hosts: Mapping[str, Placement] = field(default_factory=dict)
    """Host policies by name: CPUs, NUMA node and environment of the instances that refer to one."""
    gpus: tuple[str, ...] = ()
    """CUDA_VISIBLE_DEVICES value for GPU 0, 1, … of an instance group whose host policy names no GPUs."""
