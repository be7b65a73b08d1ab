"""Placement settings of the cluster file, and placements that can never fit."""

import json
import re
from collections.abc import Iterator, Mapping
from typing import Annotated, Any, Final, Literal, TypeVar

from pydantic import AfterValidator, Field, ValidationError

from forebay.core.errors import Conflict
from forebay.core.section import Name, Section, sections

LOCAL: Final = "local"
"""The node of a cluster that lists none: this machine, with all it has."""
CPU_MAX: Final = 4095
"""Highest core number: more than any current machine has."""
FOUND_CHARS_MAX: Final = 80
"""Most characters of a wrong value that an error shows."""
CPUS_ALLOWED: Final = (
    f"the cores that its replicas may run on, by their numbers from 0 to {CPU_MAX}, as text: 0-3,8 for five cores, "
    '"1" (with quotes) for core 1 alone; none: all'
)
S = TypeVar("S", bound=Section)
Gib = Annotated[float, Field(gt=0, le=1_048_576)]


def cpu_list(text: str) -> tuple[int, ...]:
    """The cores of a list such as `0-3,8` (Linux notation), sorted. Raises `ValueError`."""
    cpus: set[int] = set()
    for part in text.split(","):
        found = re.fullmatch(r"\s*(\d{1,4})(?:-(\d{1,4}))?\s*", part)
        first, last = (int(found[1]), int(found[2] or found[1])) if found else (1, 0)
        if first > last or last > CPU_MAX:
            raise ValueError(f"{text!r} is not a list of cores such as 0-3,8")
        cpus.update(range(first, last + 1))
    return tuple(sorted(cpus))


def _is_cpu_list(text: str) -> bool:
    try:
        cpu_list(text)
    except ValueError:
        return False
    return True


def _checked(text: str) -> str:
    cpu_list(text)
    return text


class SliceSettings(Section):
    """A MIG slice of a GPU."""

    id: Annotated[str, Field(min_length=1)]
    """The driver's id: `MIG-…`."""
    profile: Annotated[str, Field(min_length=1, examples=["1g.10gb"])]
    """Its profile."""
    memory_gib: Gib
    """Its memory, GiB."""


class GpuSettings(Section):
    """A GPU of a node."""

    id: str | None = None
    """The driver's id, `GPU-…`, or an index; none: its position in this list, from 0."""
    kind: str = ""
    """Product name for `placement.gpu_kinds`, such as `H100`."""
    memory_gib: Gib
    """Memory available to processes, GiB (`nvidia-smi` shows MiB)."""
    links: tuple[str, ...] = ()
    """Ids of the GPUs it is connected to by NVLink."""
    numa: Annotated[int, Field(ge=0, le=1024)] | None = None
    """The closest NUMA node."""
    mig: tuple[SliceSettings, ...] = ()
    """Its MIG slices, if it is partitioned: replicas then run only on these."""


class NodeSettings(Section):
    """A machine, or a part of one, that replicas run on."""

    name: Name
    """Name of the node."""
    host: Annotated[str, Field(min_length=1)] = "127.0.0.1"
    """Address that its replicas listen on and gateways connect to."""
    launcher: tuple[Annotated[str, Field(min_length=1)], ...] = ()
    """Prefix of a replica's command line, such as `[ip, netns, exec, h1]`. It must `exec` the command."""
    cpus: Annotated[str, AfterValidator(_checked), Field(examples=["0-3,8"])] | None = None
    """Cores that its replicas may run on, such as `0-3,8`; none: all."""
    memory_gib: Gib | None = None
    """Memory for replicas, GiB; none: what the machine has."""
    gpus: tuple[GpuSettings, ...] | None = None
    """Its GPUs; none: what the source of `health` finds on a node of this name."""
    role: Literal["serve", "fallback"] = "serve"
    """`fallback`: only for models with `placement.low_priority`, which run here without GPUs."""
    labels: tuple[Annotated[str, Field(min_length=1)], ...] = ()
    """Labels that `placement.labels` can require."""


class PlacementSettings(Section):
    """Where the replicas of a model run."""

    gpus: Annotated[int, Field(ge=0, le=64)] = 0
    """GPUs per replica (tensor parallelism), preferably connected by NVLink; 0: none."""
    fraction: Annotated[float, Field(gt=0, le=1)] | None = None
    """Share of each GPU's memory that a replica takes, 0..1; none: it has its GPUs to itself, or takes
    `memory_gib`."""
    memory_gib: Gib | None = None
    """Memory of a replica, GiB: on each of its GPUs, or of the node without GPUs; none: estimated from the model."""
    mig: str | None = None
    """Required MIG profile, such as `1g.10gb`; none: any device with enough memory."""
    gpu_kinds: tuple[str, ...] = ()
    """Acceptable GPU products; none: all."""
    linked: bool = False
    """Require that all GPUs of a replica are connected to each other by NVLink."""
    cpus: Annotated[int, Field(ge=0, le=1024)] = 0
    """Cores reserved per replica, exclusive among replicas that reserve any; 0: it shares the cores of its node."""
    nodes: tuple[Name, ...] = ()
    """Nodes to run on; none: all."""
    labels: tuple[str, ...] = ()
    """Labels that a node must have."""
    low_priority: bool = False
    """Its replicas may run on nodes with `role: fallback`, if there is no room elsewhere."""
    strategy: Literal["spread", "pack"] = "spread"
    """`spread`: over as many nodes as possible. `pack`: on the fullest nodes, so that others stay free."""


def placement_conflicts(raw: Mapping[str, Any]) -> tuple[Conflict, ...]:
    """Placements that can never fit, in a cluster given as unvalidated data. Parts of a wrong type are skipped."""
    given = sections(raw.get("nodes"))
    nodes = [_valid(NodeSettings, section) for section in given]
    found = [*_no_cores(given), *_twice(nodes)]
    known = {node.name: node for node in nodes if node} if all(nodes) else None
    for index, model in enumerate(sections(raw.get("models"))):
        placement = _valid(PlacementSettings, model.get("placement", {}))
        if placement:
            path = f"models[{index}].placement"
            found += _alone(path, placement)
            if known is not None:
                found += _nowhere(path, placement, known or {LOCAL: NodeSettings(name=LOCAL)})
    return tuple(found)


def _valid(kind: type[S], raw: Any) -> S | None:
    try:
        return kind.model_validate(raw)
    except ValidationError:
        return None


def _no_cores(nodes: list[Mapping[str, Any]]) -> Iterator[Conflict]:
    """Cores of a node that are not a list. A plain number is rejected: it may be meant as a count."""
    for index, node in enumerate(nodes):
        cpus = node.get("cpus")
        if cpus is not None and not (isinstance(cpus, str) and _is_cpu_list(cpus)):
            yield Conflict(f"nodes[{index}].cpus", json.dumps(cpus)[:FOUND_CHARS_MAX], CPUS_ALLOWED)


def _twice(nodes: list[NodeSettings | None]) -> Iterator[Conflict]:
    """Duplicate node names and device ids."""
    names: dict[str, int] = {}
    ids: dict[str, str] = {}
    for index, node in enumerate(nodes):
        if node is None:
            continue
        if names.setdefault(node.name, index) != index:
            found = f'"{node.name}", also the name of nodes[{names[node.name]}]'
            yield Conflict(f"nodes[{index}].name", found, "a name that no other node has")
        for place, gpu in enumerate(node.gpus or ()):
            path = f"nodes[{index}].gpus[{place}]"
            for id, where in ((gpu_id(gpu, place), path), *((s.id, f"{path}.mig") for s in gpu.mig)):
                key = f"{node.name} {id}"
                if ids.setdefault(key, where) != where:
                    yield Conflict(where, f'the id "{id}", also that of {ids[key]}', "a unique id")


def gpu_id(gpu: GpuSettings, place: int) -> str:
    """The id of a GPU at this position of its node's list."""
    return gpu.id or str(place)


def _alone(path: str, placement: PlacementSettings) -> Iterator[Conflict]:
    """Settings that have no effect, or contradict each other."""
    if placement.fraction and placement.memory_gib:
        yield Conflict(f"{path}.fraction", "a fraction together with `memory_gib`", "one of the two")
    if not placement.gpus:
        for key in ("fraction", "mig", "gpu_kinds", "linked"):
            if getattr(placement, key):
                yield Conflict(f"{path}.{key}", "set without GPUs", "this only with `gpus: 1` or more")
    if placement.mig and placement.gpus > 1:
        yield Conflict(f"{path}.mig", f"slices for {placement.gpus} GPUs", "`gpus: 1`: slices cannot be combined")


def _nowhere(path: str, placement: PlacementSettings, nodes: Mapping[str, NodeSettings]) -> Iterator[Conflict]:
    """Requirements that no node meets, as far as the file describes nodes."""
    unknown = [name for name in placement.nodes if name not in nodes]
    if unknown:
        yield Conflict(f"{path}.nodes", f'"{unknown[0]}"', f"names of `nodes`: {', '.join(sorted(nodes))}")
        return
    allowed = [node for name, node in sorted(nodes.items()) if not placement.nodes or name in placement.nodes]
    labelled = [node for node in allowed if set(placement.labels) <= set(node.labels)]
    if not labelled:
        yield Conflict(
            f"{path}.labels", ", ".join(placement.labels), "labels that at least one of its nodes has all of"
        )
        return
    serving = [node for node in labelled if placement.low_priority or node.role == "serve"]
    if not serving:
        allowed_text = "`low_priority: true`, or a node with `role: serve`"
        yield Conflict(f"{path}.low_priority", "only fallback nodes for a model of normal priority", allowed_text)
        return
    reasons = [_lacks(placement, node) for node in serving]
    if all(reasons):
        key, _, most = max(filter(None, reasons), key=lambda reason: reason[1])
        yield Conflict(f"{path}.{key}", f"{getattr(placement, key)}", most)


def _lacks(placement: PlacementSettings, node: NodeSettings) -> tuple[str, int, str] | None:
    """The field that this node can never satisfy, how far the check came, and what is allowed; None: it may fit."""
    if placement.cpus and node.cpus and placement.cpus > len(cpu_list(node.cpus)):
        return "cpus", 0, f"at most {len(cpu_list(node.cpus))}, the cores of {node.name}"
    if not placement.gpus or node.role == "fallback":
        if not placement.gpus and placement.memory_gib and node.memory_gib and placement.memory_gib > node.memory_gib:
            return "memory_gib", 1, f"at most {node.memory_gib:g}, the memory of {node.name}"
        return None
    if node.gpus is None:
        return None
    kinds = [gpu for gpu in node.gpus if not placement.gpu_kinds or gpu.kind in placement.gpu_kinds]
    if not kinds:
        return ("gpu_kinds" if node.gpus else "gpus"), 2, f"what nodes have; {node.name} has {_kinds(node)}"
    slices = [s for gpu in kinds for s in gpu.mig if placement.mig in (None, s.profile)]
    whole = [] if placement.mig else [gpu for gpu in kinds if not gpu.mig]
    devices = [*whole, *(slices if placement.gpus == 1 else ())]
    if not devices and placement.mig:
        return "mig", 3, f"a profile that a GPU is divided into; {node.name} has no such slice"
    if len(devices) < placement.gpus:
        return "gpus", 4, f"at most {len(devices)}, the suitable GPUs of {node.name}"
    large = [d for d in devices if not placement.memory_gib or d.memory_gib >= placement.memory_gib]
    if len(large) < placement.gpus:
        most = max(d.memory_gib for d in devices)
        return "memory_gib", 5, f"at most {most:g}, the memory of the largest of its GPUs"
    return None


def _kinds(node: NodeSettings) -> str:
    return ", ".join(sorted({gpu.kind or "GPUs of unspecified kind" for gpu in node.gpus or ()})) or "no GPU"
