"""The section `health` of the cluster file: where readings of devices come from, and when they serve again."""

from collections.abc import Iterator, Mapping
from typing import Annotated, Any, Literal

from pydantic import Field

from forebay.core.health.device import HealthRules
from forebay.core.placement.settings import LOCAL
from forebay.core.section import Conflict, Section, sections

RULES = HealthRules()


class HealthSettings(Section):
    """GPUs: who is asked how they are, and what follows."""

    source: Literal["auto", "off", "nvml", "dcgm", "scripted"] = "auto"
    """`nvml`: NVIDIA's library on this machine. `dcgm`: DCGM exporters, see `exporters`. `scripted`: a script, see
    `file`. `auto`: `nvml` if its driver is there. `off`: nobody."""
    file: Annotated[str, Field(min_length=1)] | None = None
    """JSON lines with readings and events for `scripted`; a relative path starts where `forebay` does."""
    exporters: dict[str, str] = Field(default_factory=dict)
    """Addresses of DCGM exporters by node, such as `{node-a: "http://10.0.0.1:9400/metrics"}`."""
    kernel_log: Annotated[str, Field(min_length=1)] | None = None
    """A file with the kernel's log, or `/dev/kmsg`, in which the driver reports XIDs; `nvml` tells of them itself."""
    poll_s: Annotated[float, Field(ge=0.1, le=300)] = 2.0
    """Time between two readings, seconds."""
    calm_s: Annotated[float, Field(ge=1, le=86_400)] = RULES.calm_s
    """After an error, a drained GPU without another one for so long is tried again, seconds; each relapse doubles it.
    For as long it is on probation then."""

    def rules(self) -> HealthRules:
        """The rules of the life of a device."""
        return HealthRules(calm_s=self.calm_s)


def health_conflicts(raw: Mapping[str, Any]) -> Iterator[Conflict]:
    """A source without what it reads, in a cluster given as plain data."""
    health = raw.get("health")
    if not isinstance(health, Mapping):
        return
    if health.get("source") == "scripted" and not health.get("file"):
        yield Conflict("health.file", "nothing, beside `source: scripted`", "a file of JSON lines")
    exporters = health.get("exporters")
    if health.get("source") == "dcgm" and not exporters:
        yield Conflict("health.exporters", "nothing, beside `source: dcgm`", "the address of an exporter by node")
    nodes = {node.get("name") for node in sections(raw.get("nodes"))} or {LOCAL}
    for name in sorted(map(str, exporters)) if isinstance(exporters, Mapping) else ():
        if name not in nodes:
            allowed = f"names of `nodes`: {', '.join(sorted(map(str, nodes)))}"
            yield Conflict(f"health.exporters.{name}", f'"{name}"', allowed)
