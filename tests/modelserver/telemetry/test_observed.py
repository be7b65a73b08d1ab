"""Telemetry of the model server: trace files, quantiles, metrics."""

import asyncio
import gc
import json
import resource
import weakref
from collections.abc import Mapping
from dataclasses import replace
from math import inf, nan
from pathlib import Path
from time import monotonic_ns
from typing import Any

import pytest
import structlog
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client.parser import text_string_to_metric_families
from tests.modelserver.http.rig import FakeModels
from tests.net.rig import run

from forebay.core.health import DeviceEvent, DeviceReading
from forebay.core.serving.config import Datatype
from forebay.core.serving.errors import Kind, Refused
from forebay.core.serving.values import Front, InferRequest, InferResponse, OnResponse, Tensor, Ticket
from forebay.engines.tensor.measures import Family, Measure, Series
from forebay.modelserver.models.running.call import Call, Spent
from forebay.modelserver.models.running.inputs import Checked
from forebay.modelserver.telemetry import trace_files
from forebay.modelserver.telemetry.gpus import Gpus
from forebay.modelserver.telemetry.latencies import STEPS_PER_OCTAVE, Latencies, Summary
from forebay.modelserver.telemetry.logs import LogSettings
from forebay.modelserver.telemetry.metrics import Machine, ServerMetrics, first_response_buckets
from forebay.modelserver.telemetry.trace_files import TraceFiles
from forebay.modelserver.telemetry.tracing import TraceSettings, Tracing
from forebay.modelserver.telemetry.watch import ObservedModels
from forebay.providers.devices.protocol import DevicesUnknown

pytestmark = pytest.mark.interpreted


class TimedModels(FakeModels):
    """Models whose requests report compute times of 1, 2 and 3 ms; those of `cached` are answered from the cache."""

    def infer(self, request: InferRequest, on_response: OnResponse) -> Any:
        if request.model == "none":
            raise Refused(Kind.NOT_FOUND, "none")
        call = Call(request, Checked(1, (), request.inputs, (), 0), on_response)
        if request.model == "slow":
            return call
        if request.model != "cached":
            call.spent = Spent(1_000_000, 2_000_000, 3_000_000)
        loop = asyncio.get_running_loop()
        outputs = (Tensor("OUT", Datatype.BYTES, (1,), b"\1\0\0\0a"),)
        loop.call_soon(call.respond, InferResponse(request.model, "1", request.id, outputs), False)
        loop.call_soon(call.respond, None, True)
        return call


NOTHING = Tracing()


def observed_models(
    server: TimedModels,
    tracing: Tracing = NOTHING,
    verbose: int = 0,
    **shown: bool,
) -> tuple[ObservedModels, TraceFiles, TraceSettings, Latencies]:
    log = structlog.get_logger()
    files = TraceFiles(log)
    traces, latencies = TraceSettings(tracing, files.retire), Latencies(**shown)
    made: Any = server
    return (
        ObservedModels(
            made, traces=traces, files=files, logs=LogSettings(verbose=verbose), log=log, latencies=latencies,
        ),
        files, traces, latencies,
    )  # fmt: skip


def infer_request(model: str = "echo", id: str = "7") -> InferRequest:
    return InferRequest(model, "", id, (Tensor("IN", Datatype.FP32, (1,), b"\0\0\x80\x3f"),))


async def ask(models: ObservedModels, request: InferRequest) -> None:
    done = asyncio.Event()
    models.infer(request, lambda _, final: done.set() if final else None)
    await done.wait()


class TicketHolder:
    """Keeps its ticket, as fronts do."""

    ticket: Ticket

    def hear(self, *_: object) -> None:
        """An answer."""


def test_finished_requests_leave_no_reference_cycles() -> None:
    async def main() -> None:
        models, *_ = observed_models(TimedModels())
        gc.disable()
        try:
            gone = []
            for model in ("echo", "slow"):
                asker = TicketHolder()
                asker.ticket = models.infer(infer_request(model), asker.hear)
                if model == "slow":
                    asker.ticket.cancel()
                gone.append(weakref.ref(asker))
                del asker
            await asyncio.sleep(0)
            await asyncio.sleep(0)
            assert [ref() for ref in gone] == [None, None]
        finally:
            gc.enable()

    run(main())


def test_trace_file_is_valid_json_after_every_flush(tmp_path: Path) -> None:
    async def main() -> None:
        path = tmp_path / "t"
        models, files, traces, _ = observed_models(
            TimedModels(), Tracing(("TIMESTAMPS", "TENSORS"), rate=2, file=str(path))
        )
        for count in (1, 2):
            for _ in range(2):
                await ask(models, infer_request())
            await files.flush(traces, last=False)
            heads = [each for each in json.loads(path.read_bytes()) if "model_name" in each]
            assert heads == [
                {"id": n, "model_name": "echo", "model_version": 1, "request_id": "7"} for n in range(1, count + 1)
            ]
        found = json.loads(path.read_bytes())
        (stamps,) = [each["timestamps"] for each in found if each["id"] == 1 and "timestamps" in each]
        assert [each["name"] for each in stamps] == [
            "REQUEST_START", "QUEUE_START", "COMPUTE_START", "COMPUTE_INPUT_END", "COMPUTE_OUTPUT_START",
            "COMPUTE_END", "REQUEST_END",
        ]  # fmt: skip
        assert stamps[4]["ns"] - stamps[3]["ns"] == 2_000_000
        assert [each["tensor"] for each in found if each["id"] == 1 and "tensor" in each] == [
            {"name": "IN", "data": "1.0", "shape": "1", "dtype": "FP32"},
            {"name": "OUT", "data": '"a"', "shape": "1", "dtype": "BYTES"},
        ]

    run(main())


def test_log_frequency_splits_traces_into_numbered_files(tmp_path: Path) -> None:
    async def main() -> None:
        path = tmp_path / "t"
        setting = Tracing(("TIMESTAMPS",), rate=1, log_frequency=2, file=str(path))
        models, files, traces, _ = observed_models(TimedModels(), setting)
        for _ in range(5):
            await ask(models, infer_request())
        await files.flush(traces, last=False)
        assert sorted(each.name for each in tmp_path.iterdir()) == ["t.0", "t.1"]
        await files.flush(traces, last=True)
        counts = [len(json.loads((tmp_path / f"t.{n}").read_bytes())) for n in range(3)]
        assert counts == [4, 4, 2]

    run(main())


def test_unwritable_traces_are_counted_as_lost(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def main() -> None:
        models, files, traces, _ = observed_models(
            TimedModels(), Tracing(("TIMESTAMPS",), rate=1, file=str(tmp_path))
        )
        await ask(models, infer_request())
        await files.flush(traces, last=True)
        assert files.lost == 1
        monkeypatch.setattr(trace_files, "WAITING_MAX", 0)
        await ask(models, infer_request())
        await files.flush(traces, last=True)
        assert files.lost == 2

    run(main())


def heads(path: Path) -> list[Any]:
    """The requests in a trace file."""
    return [each for each in json.loads(path.read_bytes()) if "model_name" in each]


def test_trace_file_is_valid_json_on_a_full_disk_and_goes_on_when_there_is_room(tmp_path: Path) -> None:
    path = tmp_path / "t"

    async def main() -> None:
        models, files, traces, _ = observed_models(TimedModels(), Tracing(("TIMESTAMPS",), 1, file=str(path)))
        await ask(models, infer_request())
        await files.flush(traces, last=False)
        before = path.read_bytes()
        await ask(models, infer_request())
        room = resource.getrlimit(resource.RLIMIT_FSIZE)
        with structlog.testing.capture_logs() as logs:
            resource.setrlimit(resource.RLIMIT_FSIZE, (len(before) + 20, room[1]))
            try:
                await files.flush(traces, last=False)
            finally:
                resource.setrlimit(resource.RLIMIT_FSIZE, room)
        assert [each["event"] for each in logs] == ["traces cannot be written"]
        assert (path.read_bytes(), files.lost) == (before, 1)
        await ask(models, infer_request())
        await files.flush(traces, last=False)
        assert len(heads(path)) == 2

    run(main())


@pytest.mark.parametrize("way", ["moved", "emptied"])
def test_trace_file_that_was_moved_away_or_emptied_is_begun_anew(tmp_path: Path, way: str) -> None:
    path = tmp_path / "t"

    async def main() -> None:
        models, files, traces, _ = observed_models(TimedModels(), Tracing(("TIMESTAMPS",), 1, file=str(path)))
        for _ in range(3):
            await ask(models, infer_request())
            await files.flush(traces, last=False)
            assert (len(heads(path)), files.lost) == (1, 0)
            if way == "moved":
                path.rename(tmp_path / "kept")
            else:
                path.write_bytes(b"")

    run(main())


def test_traces_of_rejected_and_cancelled_requests_are_complete(tmp_path: Path) -> None:
    async def main() -> None:
        path = tmp_path / "t"
        models, files, traces, latencies = observed_models(
            TimedModels(), Tracing(("TIMESTAMPS",), 1, file=str(path)), verbose=1
        )
        with pytest.raises(Refused):
            models.infer(infer_request("none"), lambda *_: None)
        ticket = models.infer(infer_request("slow", ""), lambda *_: None)
        ticket.cancel()
        ticket.cancel()
        await files.flush(traces, last=True)
        found = json.loads(path.read_bytes())
        assert [each.get("model_name") or [s["name"] for s in each["timestamps"]] for each in found] == [
            "none", "slow", ["REQUEST_START", "QUEUE_START", "REQUEST_END"],
        ]  # fmt: skip
        assert not latencies.known

    run(main())


def test_requests_whose_data_do_not_fit_their_shapes_are_traced_without_them(tmp_path: Path) -> None:
    path = tmp_path / "t"
    tensors = [
        Tensor("IN", Datatype.FP32, (1,), b"abc"),
        Tensor("IN", Datatype.FP32, (1,), bytes(8)),
        Tensor("IN", Datatype.FP32, (-1,), bytes(4)),
        Tensor("IN", Datatype.BYTES, (1,), b"abc"),
    ]

    async def main() -> None:
        models, files, traces, _ = observed_models(TimedModels(), Tracing(("TENSORS",), 1, file=str(path)))
        for tensor in tensors:
            with pytest.raises(Refused):
                models.infer(InferRequest("none", "", "7", (tensor,)), lambda *_: None)
        await files.flush(traces, last=True)

    run(main())
    found = [each["tensor"]["data"] for each in json.loads(path.read_bytes()) if "tensor" in each]
    assert found == [""] * len(tensors)


@pytest.mark.parametrize(
    ("front", "before", "behind"),
    [
        (Front.HTTP, ["HTTP_RECV_START", "HTTP_RECV_END"], ["HTTP_SEND_START", "HTTP_SEND_END"]),
        (Front.GRPC, ["GRPC_WAITREAD_START", "GRPC_WAITREAD_END"], ["GRPC_SEND_START", "GRPC_SEND_END"]),
    ],
)
def test_traces_include_frontend_timestamps(
    tmp_path: Path, front: Front, before: list[str], behind: list[str]
) -> None:
    def come(model: str) -> InferRequest:
        request = infer_request(model)
        request.front, request.came_ns = front, monotonic_ns()
        return request

    async def main() -> None:
        path = tmp_path / "t"
        models, files, traces, _ = observed_models(TimedModels(), Tracing(("TIMESTAMPS",), 1, file=str(path)))
        await ask(models, come("echo"))
        models.infer(come("slow"), lambda *_: None).cancel()
        with pytest.raises(Refused):
            models.infer(come("none"), lambda *_: None)
        await files.flush(traces, last=True)
        found = json.loads(path.read_bytes())
        assert [each.get("model_name") or [s["name"] for s in each["timestamps"]] for each in found] == [
            before, "echo",
            [
                "REQUEST_START", "QUEUE_START", "COMPUTE_START", "COMPUTE_INPUT_END", "COMPUTE_OUTPUT_START",
                "COMPUTE_END", "INFER_RESPONSE_COMPLETE", "REQUEST_END", *behind,
            ],
            before, "slow", ["REQUEST_START", "QUEUE_START", "REQUEST_END"],
            before, "none",
        ]  # fmt: skip
        whole = (*before, "REQUEST_START", "REQUEST_END", *behind)
        times = [
            s["ns"] for each in found if each["id"] == 1 for s in each.get("timestamps", ()) if s["name"] in whole
        ]
        assert times == sorted(times)
        assert len(times) == len(whole)

    run(main())


def test_draining_server_is_not_ready() -> None:
    models = observed_models(TimedModels())[0]
    assert models.ready
    models.draining = True
    assert not models.ready


@given(st.lists(st.integers(0, 10**13), min_size=1, max_size=60), st.sampled_from([0.1, 0.5, 0.9, 0.999]))
def test_quantile_error_is_bounded_and_never_below_exact(durations_ns: list[int], share: float) -> None:
    summary = Summary()
    for ns in durations_ns:
        summary.observe(ns)
    microseconds = sorted(ns // 1000 for ns in durations_ns)
    exact = next(us for rank, us in enumerate(microseconds, 1) if rank >= share * len(microseconds))
    assert exact <= summary.quantile(share) <= max(2, exact) * (1 + 1 / STEPS_PER_OCTAVE) + 1
    assert summary.count == len(durations_ns)
    assert Summary().quantile(0.5) == 0


def samples(metrics: ServerMetrics) -> Mapping[tuple[str, str], float]:
    """By name and model."""
    return {
        (sample.name.removesuffix("_total"), sample.labels.get("model", "")): sample.value
        for family in text_string_to_metric_families(metrics.render().decode())
        for sample in family.samples
    }


def test_metrics_have_triton_names_and_forebay_names() -> None:
    async def main() -> None:
        models, _, _, latencies = observed_models(TimedModels(), summaries=True, first_responses=True)
        await ask(models, infer_request())
        assert (
            'quantile="0.25"' in ServerMetrics(models, latencies, summaries=True, quantiles=[0.25]).render().decode()
        )
        found = samples(ServerMetrics(models, latencies, summaries=True))
        assert found["nv_inference_request_success", "echo"] == 2
        assert found["nv_inference_count", "echo"] == 3
        assert found["nv_inference_exec_count", "words"] == 0
        assert found["nv_inference_pending_request_count", "echo"] == 0
        assert found["forebay_modelserver_request_seconds_count", "echo"] == 1
        assert found["nv_inference_compute_infer_summary_us_sum", "echo"] == 2000
        assert 2000 <= found["nv_inference_compute_infer_summary_us", "echo"] <= 2250
        assert found["forebay_modelserver_ready", ""] == 1
        assert "nv_inference_request_duration_us" not in {
            n for n, _ in samples(ServerMetrics(models, latencies, counters=False))
        }
        await ask(models, infer_request("words"))
        assert (
            samples(ServerMetrics(models, latencies))["nv_inference_first_response_histogram_ms_count", "words"] == 1
        )

    run(main())


def test_answers_from_the_cache_are_not_in_summaries_of_compute_times() -> None:
    async def main() -> None:
        models, _, _, latencies = observed_models(TimedModels(), summaries=True)
        await ask(models, infer_request("cached"))
        assert list(latencies.known["cached", "1"].phases) == ["request", "queue"]

    run(main())


class Devices:
    """A GPU with a slice, and one that has gone; fails after its last reading."""

    def __init__(self, energies_j: list[float | None], end: Exception | None = None) -> None:
        self.energies_j = energies_j
        self.end = end or DevicesUnknown("the driver is gone")
        self.closed = False

    def readings(self) -> tuple[DeviceReading, ...]:
        if not self.energies_j:
            raise self.end
        whole = DeviceReading("GPU-a", memory_bytes=80, memory_used_bytes=8, duty=0.5, power_w=300.0)
        return (
            replace(whole, energy_j=self.energies_j.pop(0)),
            DeviceReading("MIG-a", parent="GPU-a", memory_bytes=10),
            DeviceReading("GPU-b", memory_bytes=80, lost=True),
        )

    def events(self) -> tuple[DeviceEvent, ...]:
        return ()

    def close(self) -> None:
        self.closed = True


@pytest.mark.parametrize(
    ("end", "why"),
    [(None, "the driver is gone"), (ValueError("not a name"), "ValueError: not a name")],
)
def test_gpu_metrics_end_when_the_driver_fails(end: Exception | None, why: str) -> None:
    async def main() -> None:
        models, _, _, latencies = observed_models(TimedModels())
        metrics, devices = ServerMetrics(models, latencies), Devices([1000.0, 1250.0], end)
        metrics.gpus = Gpus(devices, 0.0, structlog.get_logger())
        with structlog.testing.capture_logs() as logs:
            await metrics.gpus.run()
        assert (gpu_lines(metrics), devices.closed) == ([], True)
        assert logs == [{"event": "no metrics of GPUs", "why": why, "log_level": "warning"}]

    run(main())


def test_gpu_metrics_omit_unknown_values() -> None:
    async def main() -> None:
        models, _, _, latencies = observed_models(TimedModels())
        metrics = ServerMetrics(models, latencies)
        for energies_j, more in (([5.0, 7.5], ["nv_energy_consumption 2.5"]), ([None, None], [])):
            metrics.gpus = Gpus(Devices(list(energies_j)), 3600.0, structlog.get_logger())
            for _ in energies_j:
                await metrics.gpus.look_now()
            assert gpu_lines(metrics) == [*KNOWN, *more]

    run(main())


KNOWN = [
    "nv_gpu_utilization 0.5", "nv_gpu_memory_total_bytes 80", "nv_gpu_memory_used_bytes 8", "nv_gpu_power_usage 300",
]  # fmt: skip


def gpu_lines(metrics: ServerMetrics) -> list[str]:
    lines = [each for each in metrics.render().decode().splitlines() if "gpu_uuid=" in each]
    assert all('{gpu_uuid="GPU-a"} ' in each for each in lines)
    return [each.replace('{gpu_uuid="GPU-a"}', "") for each in lines]


def test_model_metrics_are_rendered_beside_server_metrics() -> None:
    models, _, _, latencies = observed_models(TimedModels(), summaries=True)
    metrics = ServerMetrics(models, latencies, summaries=True, quantiles=(0.25,))
    labels = (("a", 'x"\\\n'), ("b", ""))
    metrics.own = (
        Family("seen", Measure.COUNTER, "How \\ many\nthere were.", (Series(labels, 3),)),
        Family("level", Measure.GAUGE, "", (Series((), nan), Series((("a", "1"),), -inf))),
        Family("sizes", Measure.HISTOGRAM, "", (Series((), 11.5, 0, (1.0, 2.5), (2, 1, 4)),)),
        Family("nv_inference_count", Measure.COUNTER, "Not theirs.", (Series((), 99),)),
    )
    text = metrics.render().decode()
    found = {family.name: family for family in text_string_to_metric_families(text)}
    assert "# TYPE seen counter" in text.splitlines()
    assert found["seen"].documentation == "How \\ many\nthere were."
    assert [sample.labels for sample in found["seen"].samples] == [dict(labels)]
    assert [str(sample.value) for sample in found["level"].samples] == ["nan", "-inf"]
    assert {(sample.name, sample.labels.get("le")): sample.value for sample in found["sizes"].samples} == {
        ("sizes_bucket", "1"): 2, ("sizes_bucket", "2.5"): 3, ("sizes_bucket", "+Inf"): 7,
        ("sizes_count", None): 7, ("sizes_sum", None): 11.5,
    }  # fmt: skip
    assert "Not theirs." not in text
    ends = "forebay_modelserver_tls_certificate_expiry_seconds"
    assert (ends, "") not in samples(metrics)
    metrics.certificate_ends_s = 1.7e9
    assert samples(metrics)[ends, ""] == 1.7e9
    assert found["nv_model_load_duration_secs"].samples[0].value == 0


def test_histogram_buckets_can_be_set_per_model() -> None:
    control = {
        "metric_identifier": {"family": "nv_inference_first_response_histogram_ms"},
        "histogram_options": {"buckets": [8, 1]},
    }
    assert first_response_buckets({"model_metrics": {"metric_control": [{}, control]}}) == (1, 8)
    assert first_response_buckets({}) == (100, 500, 2000, 5000)


def test_machine_metrics_are_omitted_without_proc(tmp_path: Path) -> None:
    assert list(Machine(tmp_path).look()) == []
    (tmp_path / "stat").write_text("cpu  10 0 10 60 20 0 0 0 0 0\n")
    (tmp_path / "meminfo").write_text("MemTotal: 8 kB\nMemAvailable: 2 kB\n")
    assert [value for _, value in Machine(tmp_path).look()] == [pytest.approx(0.2), 8192, 6144]
