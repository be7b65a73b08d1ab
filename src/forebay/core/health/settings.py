"""The section `health` of the cluster file: the source of device readings, and recovery."""

from collections.abc import Iterator, Mapping
from typing import Annotated, Any, Literal

from pydantic import Field

from forebay.core.errors import Conflict
from forebay.core.health.device import HealthRules
from forebay.core.placement.settings import LOCAL
from forebay.core.section import Section, sections

RULES = HealthRules()


class HealthSettings(Section):
    """GPU health: where readings come from, and when a failed GPU is used again."""

    source: Literal["auto", "off", "nvml", "dcgm", "scripted"] = "auto"
    """`nvml`: NVIDIA's library on this machine. `dcgm`: DCGM exporters, see `exporters`. `scripted`: a script, see
    `file`. `auto`: `nvml` if its driver is installed. `off`: none."""
    file: Annotated[str, Field(min_length=1)] | None = None
    """JSON lines with readings and events for `scripted`; a relative path starts where `forebay` does."""
    exporters: dict[str, str] = Field(default_factory=dict)
    """Addresses of DCGM exporters by node, such as `{node-a: "http://10.0.0.1:9400/metrics"}`."""
    kernel_log: Annotated[str, Field(min_length=1)] | None = None
    """The kernel's log file, or `/dev/kmsg`, where the driver reports XIDs; `nvml` reports them itself."""
    poll_s: Annotated[float, Field(ge=0.1, le=300)] = 2.0
    """Interval between readings, seconds."""
    calm_s: Annotated[float, Field(ge=1, le=86_400)] = RULES.calm_s
    """A GPU drained after an error is tried again after this long without another one, seconds; each relapse doubles
    it. It is then on probation for as long again."""

    def rules(self) -> HealthRules:
        """The rules of device health."""
        return HealthRules(calm_s=self.calm_s)


def health_conflicts(raw: Mapping[str, Any]) -> Iterator[Conflict]:
    """Sources without their inputs, in a cluster given as unvalidated data."""
    health = raw.get("health")
    if not isinstance(health, Mapping):
        return
    if health.get("source") == "scripted" and not health.get("file"):
        yield Conflict("health.file", "nothing, with `source: scripted`", "a file of JSON lines")
    exporters = health.get("exporters")
    if health.get("source") == "dcgm" and not exporters:
        yield Conflict("health.exporters", "nothing, with `source: dcgm`", "the address of an exporter by node")
    nodes = {node.get("name") for node in sections(raw.get("nodes"))} or {LOCAL}
    for name in sorted(map(str, exporters)) if isinstance(exporters, Mapping) else ():
        if name not in nodes:
            allowed = f"names of `nodes`: {', '.join(sorted(map(str, nodes)))}"
            yield Conflict(f"health.exporters.{name}", f'"{name}"', allowed)
