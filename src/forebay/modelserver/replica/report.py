"""Reports of a model server as a replica: load, and the metrics that every replica has."""

from forebay.core.model import LoadReport, ReplicaState, WorkerSpec
from forebay.core.serving.config import ModelConfig
from forebay.core.serving.errors import Refused
from forebay.modelserver.replica.aliased import AliasedModel
from forebay.modelserver.server import ModelServer, Processes
from forebay.modelserver.telemetry.metrics import exposition
from forebay.obs.clock import new_id
from forebay.obs.metrics import Metrics


class Reporter:
    """Makes load reports. The batch fill ratio covers the batches since the last report."""

    def __init__(
        self, spec: WorkerSpec, server: ModelServer, aliased: AliasedModel, metrics: Metrics, version: str
    ) -> None:
        self._spec = spec
        self._server = server
        self._aliased = aliased
        self._metrics = metrics
        self._rows = self._executions = 0
        self._fill = 0.0
        self._replaced = 0
        self.grpc_port = 0
        self._process = new_id("process")
        self.draining = False
        self.fenced = False
        """The lease has ended."""
        self.asked_at = 0.0
        """When the load was last requested, by the loop's clock."""
        metrics.gauge("build_info", version, "modelserver").set(1)

    @property
    def state(self) -> ReplicaState:
        """Warming until the model is served, and while its processes are being replaced."""
        if self.draining:
            return ReplicaState.DRAINING
        return ReplicaState.READY if self._aliased.ready else ReplicaState.WARMING

    @property
    def capacity(self) -> int:
        """Requests of one row that can run at once; 0 while unknown."""
        try:
            view = self._server.view(self._aliased.model, "")
        except Refused:
            return 0
        return places(view.config, self._server)

    def report(self) -> LoadReport:
        """The current load."""
        spec, aliased, processes = self._spec, self._aliased, self._processes()
        self._replaced = max(self._replaced, processes.replaced)  # a reloaded model restarts its count
        waiting = min(aliased.in_flight, self._look())
        return LoadReport(
            replica=spec.replica,
            generation=spec.generation,
            model=spec.model,
            revision=spec.revision,
            state=self.state,
            in_flight=aliased.in_flight,
            running=aliased.in_flight - waiting,
            waiting=waiting,
            capacity=self.capacity,
            batch_fill=self._fill,
            stalled_s=processes.stalled_s,
            engine_restarts=self._replaced,
            engine_pid=next(iter(processes.pids), 0),
            grpc_port=self.grpc_port,
            process=self._process,
        )

    async def render(self) -> bytes:
        """All metrics in Prometheus' text format, including the model's own."""
        own = await self._server.measure()
        load, metrics, labels = self.report(), self._metrics, (self._spec.model, self._spec.replica)
        gauges: dict[str, float] = {
            "worker_in_flight": load.in_flight,
            "worker_running": load.running,
            "worker_waiting": load.waiting,
            "worker_batch_fill_ratio": load.batch_fill,
            "worker_engine_stalled_seconds": load.stalled_s,
            "worker_engine_up": load.state in (ReplicaState.READY, ReplicaState.DRAINING),
        }
        for name, value in gauges.items():
            metrics.gauge(name, *labels).set(value)
        replaced = metrics.counter("worker_engine_restarts_total", *labels)
        replaced.inc(load.engine_restarts - replaced.value)
        return metrics.render() + exposition(own)

    def _processes(self) -> Processes:
        try:
            return self._server.processes()
        except Refused:
            return Processes((), 0, 0.0)

    def _look(self) -> int:
        """Requests that wait for an instance, in all models: steps of an ensemble wait in their own."""
        try:
            waiting = sum(each.pending for each in self._server.statistics("", ""))
            served = self._server.statistics(self._aliased.model, "")
            rows_max = max(1, self._server.view(self._aliased.model, "").config.max_batch)
        except Refused:
            return 0
        # not `inference_count`, which leaves out what failed
        rows = sum(size * found.compute_infer.count for each in served for size, found in each.batches.items())
        executions = sum(each.execution_count for each in served)
        if executions != self._executions:
            if executions > self._executions:  # a reloaded model restarts its count
                share = (rows - self._rows) / (executions - self._executions) / rows_max
                self._fill = min(1.0, max(0.0, share))
            self._rows, self._executions = rows, executions
        return waiting


def places(config: ModelConfig, server: ModelServer) -> int:
    """Requests of one row that run at once; of an ensemble, in all of its steps together."""
    if not config.steps or config.in_process:
        return max(1, config.instance_count * max(1, config.max_batch))
    parts = (server.lookup(step.model, step.version) for step in config.steps)
    return max(1, sum(places(part, server) for part in parts if part is not None))
