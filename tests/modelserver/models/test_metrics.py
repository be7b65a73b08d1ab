"""Custom metrics of Python models, from their processes to the server; latencies of models that others use."""

import asyncio
import os
import signal
from collections.abc import Mapping
from pathlib import Path

from tests.modelserver.models.rig import Server, config, serving, tensor, until, write
from tests.modelserver.models.test_ensembles import chain

from forebay.engines.tensor.measures import Measure
from forebay.modelserver.models.running.call import Call

ONE = tensor("IN", [[1.0]])
COUNTING = """
    def initialize(self, args):
        kinds = pb_utils.MetricFamily
        self.family = kinds(name="seen_requests", description="What came.", kind=kinds.COUNTER)
        self.seen = self.family.Metric(labels={{"model": args["model_name"]}})
        self.level = kinds("level", "How it stands.", kinds.GAUGE).Metric()
        self.sizes = kinds("sizes", "How large.", kinds.HISTOGRAM).Metric(buckets=[1, 10])
    def answer(self, request):
        self.seen.increment(1)
        self.level.set(get(request).item())
        self.sizes.observe(get(request).item())
        return give(np.float32([[self.seen.value()]]))
""".replace("{{", "{").replace("}}", "}")


async def metrics_of(server: Server) -> Mapping[str, float]:
    return {
        family.name + "".join(value for _, value in series.labels): series.value
        for family in await server.measure()
        for series in family.series
    }


def test_model_metrics_are_exported_until_the_model_is_unloaded(tmp_path: Path) -> None:
    write(tmp_path, "a", config("instance_group { kind: KIND_CPU count: 2 }", max_batch=1), COUNTING)
    write(tmp_path, "b", config(), COUNTING)

    async def main() -> None:
        async with serving(tmp_path, startup=("a", "b")) as server:
            assert (await metrics_of(server))["seen_requestsa"] == 0
            asked = [server.ask("a", ONE) for _ in range(20)]
            for each in asked:
                await each.one()
            await server.numbers("b", tensor("IN", [[7.0]]))
            assert await metrics_of(server) == {"seen_requestsa": 20, "seen_requestsb": 1, "level": 7, "sizes": 27}
            families = {family.name: family for family in await server.measure()}
            assert families["seen_requests"].help == "What came."
            (sizes,) = families["sizes"].series
            assert (families["sizes"].kind, sizes.bounds, sizes.counts) == (Measure.HISTOGRAM, (1, 10), (20, 1, 0))
            await server.unload("b", False)
            assert await metrics_of(server) == {"seen_requestsa": 20, "level": 1, "sizes": 20}
            await server.unload("a", False)
            assert await metrics_of(server) == {}

    asyncio.run(main())


def test_model_counters_survive_process_restarts(tmp_path: Path) -> None:
    groups = "instance_group { kind: KIND_CPU count: %d }"
    write(tmp_path, "a", config(groups % 2, max_batch=1), COUNTING)

    async def main() -> None:
        async with serving(tmp_path, startup=("a",)) as server:
            for _ in range(3):
                await server.numbers("a", ONE)
            assert (await metrics_of(server))["seen_requestsa"] == 3
            first = server.pids("a")
            os.kill(first[0], signal.SIGKILL)
            await until("it is replaced", lambda: len(server.pids("a")) == 2 and first[0] not in server.pids("a"))
            await until("it is ready", lambda: server.ready)
            assert (await metrics_of(server))["seen_requestsa"] == 3
            await server.numbers("a", ONE)
            write(tmp_path, "a", config(groups % 1, max_batch=1), COUNTING, versions=())
            await server.load("a", {})
            await until("one has ended", lambda: len(server.pids("a")) == 1)
            assert (await metrics_of(server))["seen_requestsa"] == 4
            os.kill(server.pids("a")[0], signal.SIGSTOP)
            assert (await metrics_of(server))["seen_requestsa"] == 4
            os.kill(server.pids("a")[0], signal.SIGCONT)

    asyncio.run(main())


def test_steps_and_calls_are_measured_like_requests_of_clients(tmp_path: Path) -> None:
    chain(tmp_path)
    calls = """
    def answer(self, request):
        asked = pb_utils.InferenceRequest(model_name="double", requested_output_names=["OUT"],
                                          inputs=[pb_utils.Tensor("IN", get(request))])
        answer = asked.exec()
        return pb_utils.InferenceResponse(answer.output_tensors(), error=answer.error())
"""
    write(tmp_path, "calls", config(), calls)
    seen: list[tuple[str, str]] = []

    def note(model: str, version: str, call: Call, first_ns: int, end_ns: int) -> None:
        assert call.started_ns <= first_ns <= end_ns
        seen.append((model, version))

    async def main() -> None:
        async with serving(tmp_path, startup=("*",)) as server:
            server.itself.measured = note
            assert await server.numbers("both", ONE) == [[4.0]]
            assert seen == [("add", "1"), ("double", "1")]
            assert await server.numbers("calls", ONE) == [[2.0]]
            assert seen[2:] == [("double", "1")]
            for model in ("both", "calls"):
                await server.ask(model, tensor("IN", [[500.0]])).error()
            assert seen[3:] == [("add", "1")], "failures have no latency"

    asyncio.run(main())
