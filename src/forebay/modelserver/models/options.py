"""What an operator decides for the whole model server."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path

from forebay.core.serving.limiter import Amount
from forebay.modelserver.process.placement import Placement
from forebay.modelserver.repository import Rules


class Control(StrEnum):
    """Who says which models of the repository are served; Triton's `--model-control-mode`."""

    NONE = "none"
    """All that are there at the start."""
    POLL = "poll"
    """All that are there; the repository is looked at again and again."""
    EXPLICIT = "explicit"
    """Those named at the start, and what is loaded and unloaded by request."""


@dataclass(frozen=True, slots=True)
class Options:
    """Settings of the model server. Every queue, size and time has its limit here."""

    repositories: tuple[Path, ...] = ()
    control: Control = Control.NONE
    startup: tuple[str, ...] = ()
    """EXPLICIT: what is loaded at the start; `*` alone is everything."""
    poll_s: float = 15.0
    strict_readiness: bool = True
    """The server is ready only if every model is; False: as soon as the start is over."""
    rules: Rules = field(default_factory=Rules)
    queue_max: int = 10_000
    """Requests that one model version has, waiting and running; more are refused (UNAVAILABLE)."""
    held_bytes_max: int = 2 * 2**30
    """Bytes of their inputs; one request alone may have more."""
    strings_max: int = 1_000_000
    """Elements of one BYTES tensor; each is looked at."""
    hang_s: float = 60.0
    """A batch that takes longer is a hang: the process is replaced."""
    load_timeout_s: float = 600.0
    drain_s: float = 30.0
    """For how long a version that is unloaded or replaced still works on the requests that it has."""
    loads_max: int = 4
    """Models that load at the same time."""
    cache_bytes: int = 0
    """Of the response cache; 0: none."""
    memory_bytes: int = 0
    """Of all loaded models together; the least recently used give way. 0: no budget."""
    room_wait_s: float = 30.0
    """For how long requests wait for memory that models hold which are busy; loads wait for `load_timeout_s`."""
    turn_s: float = 10.0
    """For how long a model that is always busy keeps its memory when others wait for it."""
    measure_s: float = 5.0
    """How often it is looked at what models hold that have been used."""
    pinned: frozenset[str] = frozenset()
    """Models that never give way."""
    rss_bytes_max: int = 0
    """A model process that has grown beyond this is replaced; 0: any size."""
    limited: bool = False
    """Instances wait for the resources they name (Triton's `--rate-limit=execution_count`)."""
    amounts: tuple[Amount, ...] = ()
    """How much there is of the resources; what is not named is as much as the instance needs that needs most."""
    hosts: Mapping[str, Placement] = field(default_factory=dict)
    """Host policies by name: CPUs, memory node and environment of the instances that name one."""
    gpus: tuple[str, ...] = ()
    """For CUDA_VISIBLE_DEVICES: what GPU 0, 1, … of an instance group is where its policy names none."""
