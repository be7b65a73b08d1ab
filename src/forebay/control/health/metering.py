"""Metrics of nodes and devices."""

from collections.abc import Mapping

from forebay.control.health.node_state import NodeState
from forebay.core.health import DeviceReading, DeviceState, Health, Remedy
from forebay.obs.metrics import Metrics

GAUGES = ("device_temperature_celsius", "device_duty_ratio", "device_weight", "device_memory_used_bytes")


class Meters:
    """Sets them. Unknown values are absent rather than zero."""

    def __init__(self, metrics: Metrics) -> None:
        self._metrics = metrics
        self._read: set[str] = set()

    def device(self, reading: DeviceReading, state: DeviceState) -> None:
        """Update the metrics of a device, from a reading or its last known state."""
        node = reading.node
        values = (reading.temperature_c, reading.duty, state.weight, reading.memory_used_bytes)
        for name, value in zip(GAUGES, values, strict=True):
            if value is None:
                self._metrics.forget(name, node, reading.device)
            else:
                self._metrics.gauge(name, node, reading.device).set(value)
        for each in Health:
            self._metrics.gauge("device_state", node, reading.device, each.value).set(state.state is each)

    def forget(self, reading: DeviceReading) -> None:
        """Remove the metrics of a device that is gone."""
        for name in GAUGES:
            self._metrics.forget(name, reading.node, reading.device)
        for each in Health:
            self._metrics.forget("device_state", reading.node, reading.device, each.value)

    def error(self, node: str, device: str, remedy: Remedy) -> None:
        """Count an error of a device."""
        self._metrics.counter("device_errors_total", node, device, remedy.name.lower()).inc()

    def nodes(self, nodes: Mapping[str, NodeState]) -> None:
        """Which nodes are drained."""
        for name, node in nodes.items():
            self._metrics.gauge("node_drained", name).set(node.record.maintenance is not None)

    def sources(self, troubles: Mapping[str, str]) -> None:
        """Whether the devices of each node can be read; all nodes with a source, and why not."""
        for gone in self._read - troubles.keys():
            self._metrics.forget("device_source_up", gone)
        self._read = set(troubles)
        for node, trouble in troubles.items():
            self._metrics.gauge("device_source_up", node).set(not trouble)
