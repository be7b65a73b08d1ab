"""A model server as a replica, in the test's own event loop, with real models."""

import asyncio
import contextlib
import gc
import os
import resource
import signal
import weakref
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import structlog
import tritonclient.grpc.aio as grpc
from prometheus_client.parser import text_string_to_metric_families
from tests.e2e.cluster import free_ports
from tests.modelserver.http.rig import FakeModels
from tests.modelserver.replica.models import CALLING, COUNTING, ERRING, SLOW, double, python
from tests.net.rig import Answer, peer, run, until

from forebay.core.model import Endpoint, LoadReport, ReplicaState, Task, WorkerSpec
from forebay.core.serving.errors import Kind, Refused
from forebay.core.serving.values import InferRequest, OnResponse, Ticket
from forebay.modelserver.replica import serve
from forebay.modelserver.replica.aliased import AliasedModel
from forebay.modelserver.replica.choosing import Choice
from forebay.net.ports import NoPort
from forebay.obs.metrics import Metrics

PATIENCE_S = 60.0
LOG = structlog.wrap_logger(structlog.testing.CapturingLogger(), processors=[])
INFER = b"/v2/models/mine/infer"


def tensor(*values: float) -> bytes:
    given = {"name": "IN", "shape": [1, 4], "datatype": "FP32", "data": list(values)}
    return msgspec.json.encode({"inputs": [given]})


@dataclass
class Replica:
    port: int
    stop: asyncio.Event
    done: "asyncio.Task[None]"

    async def ask(self, method: bytes, target: bytes, body: bytes = b"", *fields: bytes) -> Answer:
        lines = b"".join(line + b"\r\n" for line in fields)
        async with peer(self.port) as client:
            head = b"%b %b HTTP/1.1\r\nhost: a\r\n%bcontent-length: %d\r\n\r\n" % (method, target, lines, len(body))
            client.send(head + body)
            async with asyncio.timeout(PATIENCE_S):
                return await client.answer()

    async def load(self) -> LoadReport:
        return msgspec.json.decode((await self.ask(b"GET", b"/load")).body, type=LoadReport)

    async def until(self, holds: Callable[[LoadReport], bool]) -> LoadReport:
        async with asyncio.timeout(PATIENCE_S):
            while not holds(found := await self.load()):
                await asyncio.sleep(0.005)
            return found


@contextlib.asynccontextmanager
async def replica(folder: Path, choice: Choice, *, ready: bool = True, **more: Any) -> AsyncIterator[Replica]:
    path = folder / "endpoint.json"
    spec = WorkerSpec(
        "mine-0", 3, "mine", "r-1", Task.TENSOR, "modelserver", "", str(path), port_first=23_000, **more
    )
    stop = asyncio.Event()
    async with asyncio.TaskGroup() as tasks:
        done = tasks.create_task(serve.run(spec, choice, LOG, stop))
        try:
            async with asyncio.timeout(PATIENCE_S):
                while not path.exists() and not done.done():
                    await asyncio.sleep(0.005)
            found = Replica(msgspec.json.decode(path.read_bytes(), type=Endpoint).port, stop, done)
            if ready:
                await found.until(lambda load: load.state is ReplicaState.READY)
            yield found
        finally:
            stop.set()


async def stop(pid: int) -> None:
    """Stop a process. It is not at once: what runs on another core may still answer."""
    os.kill(pid, signal.SIGSTOP)
    tasks = Path(f"/proc/{pid}/task")
    await until(lambda: all(each.read_text().rpartition(")")[2].split()[0] == "T" for each in tasks.glob("*/stat")))


def test_replica_serves_its_model_under_the_cluster_name_and_counts_requests(tmp_path: Path) -> None:
    async def main() -> None:
        choice = Choice(double(double(tmp_path / "all"), "other"), "double")
        async with replica(tmp_path, choice) as server:
            got = await server.ask(b"POST", INFER, tensor(1, 2, 3, 4), b"x-request-id: mine-1")
            said = msgspec.json.decode(got.body)
            assert (got.status, got.headers[b"x-request-id"]) == (200, b"mine-1")
            assert (said["model_name"], said["outputs"][0]["data"]) == ("mine", [2, 4, 6, 8])
            for unit, status in ((b"mine-0.3", 200), (b"mine-0.2", 503)):
                meant = await server.ask(b"POST", INFER, tensor(1, 2, 3, 4), b"x-forebay-unit: %b" % unit)
                assert meant.status == status
            assert msgspec.json.decode(meant.body)["error"]["code"] == "other_replica"
            for end in (b"", b"/config"):
                assert (
                    msgspec.json.decode((await server.ask(b"GET", b"/v2/models/mine" + end)).body)["name"] == "mine"
                )
            stats = msgspec.json.decode((await server.ask(b"GET", b"/v2/models/mine/stats")).body)["model_stats"]
            assert [(each["name"], each["inference_count"]) for each in stats] == [("mine", 2)]
            wrong = await server.ask(b"POST", INFER, b'{"inputs":[]}')
            assert (wrong.status, b"'double'" in wrong.body) == (400, False)
            for name in (b"double", b"other"):
                assert (await server.ask(b"POST", b"/v2/models/%b/infer" % name, tensor(1, 2, 3, 4))).status == 404
            assert (await server.ask(b"POST", b"/v2/repository/models/mine/unload")).status == 501

            load = await server.load()
            assert (load.replica, load.generation, load.model, load.in_flight) == ("mine-0", 3, "mine", 0)
            assert (load.capacity, load.batch_fill) == (16, 0.125)
            for path, status in ((b"/livez", 200), (b"/readyz", 200), (b"/metrics", 200), (b"/nowhere", 404)):
                assert (await server.ask(b"GET", path)).status == status
            assert (await server.ask(b"POST", b"/load")).status == 405
            metrics = (await server.ask(b"GET", b"/metrics")).body
            labels = b'{code="ok",endpoint="infer",model="mine",replica="mine-0"}'
            assert b"forebay_worker_requests_total%b 2.0\n" % labels in metrics

    run(main())


@pytest.mark.slow
def test_model_metrics_are_exported_beside_replica_metrics(tmp_path: Path) -> None:
    async def main() -> None:
        async with replica(tmp_path, Choice(python(tmp_path / "all", "own", COUNTING), "own")) as server:
            assert (await server.ask(b"POST", INFER, tensor(1, 2, 3, 4))).status == 200
            text = (await server.ask(b"GET", b"/metrics")).body.decode()
            found = {family.name: family for family in text_string_to_metric_families(text)}
            assert {sample.labels["kind"]: sample.value for sample in found["rows_seen"].samples} == {"row": 1}
            assert [sample.labels["model"] for sample in found["forebay_worker_running"].samples] == ["mine"]

    run(main())


@pytest.mark.slow
def test_requests_that_fail_fill_batches_too(tmp_path: Path) -> None:
    async def main() -> None:
        async with replica(tmp_path, Choice(python(tmp_path / "all", "own", ERRING), "own")) as server:
            assert (await server.ask(b"POST", INFER, tensor(1, 2, 3, 4))).status == 500
            load = await server.load()
            assert load.batch_fill == 1 / load.capacity

    run(main())


@pytest.mark.slow
def test_load_report_has_engine_pid_restarts_and_stalls(tmp_path: Path) -> None:
    async def main() -> None:
        async with replica(tmp_path, Choice(double(tmp_path / "all"), "double"), engine_hang_s=5.0) as server:
            before = await server.load()
            assert (before.engine_restarts, before.stalled_s, before.grpc_port) == (0, 0.0, 0)
            await stop(before.engine_pid)
            async with asyncio.TaskGroup() as tasks:
                asked = tasks.create_task(server.ask(b"POST", INFER, tensor(1, 2, 3, 4)))
                stalled = await server.until(lambda load: load.stalled_s > 0)
                assert (stalled.engine_pid, stalled.engine_restarts) == (before.engine_pid, 0)
                os.kill(before.engine_pid, signal.SIGKILL)
            assert asked.result().status == 503
            after = await server.until(lambda load: load.engine_restarts == 1 and load.state is ReplicaState.READY)
            assert (after.engine_pid not in (0, before.engine_pid), after.stalled_s) == (True, 0.0)
            metrics = (await server.ask(b"GET", b"/metrics")).body
            assert b'forebay_worker_engine_restarts_total{model="mine",replica="mine-0"} 1.0\n' in metrics

    run(main())


def test_draining_replica_finishes_requests_and_rejects_new_ones_as_retryable(
    tmp_path: Path,
) -> None:
    async def main() -> None:
        choice = Choice(python(tmp_path / "all", "slow", SLOW), "slow")
        async with replica(tmp_path, choice) as server, asyncio.TaskGroup() as tasks:
            body = tensor(1, 2, 3, 4)
            under_way = [tasks.create_task(server.ask(b"POST", INFER, body)) for _ in range(8)]
            async with peer(server.port) as late:
                late.send(b"GET /livez HTTP/1.1\r\nhost: a\r\n\r\n")
                await late.answer()
                # every one of them has been received, and some may have been answered
                await server.until(lambda load: load.in_flight + sum(each.done() for each in under_way) == 8)
                server.stop.set()
                await server.until(lambda load: load.state is ReplicaState.DRAINING)
                late.send(b"POST %b HTTP/1.1\r\nhost: a\r\ncontent-length: %d\r\n\r\n%b" % (INFER, len(body), body))
                refused = await late.answer()
            assert [each.status for each in await asyncio.gather(*under_way)] == [200] * 8
            assert (refused.status, refused.headers[b"x-forebay-retryable"]) == (503, b"1")
            assert msgspec.json.decode(refused.body)["error"]["code"] == "draining"
            async with asyncio.timeout(PATIENCE_S):
                await server.done

    run(main())


def test_replica_that_is_cancelled_while_it_ends_closes_its_port(tmp_path: Path) -> None:
    async def main() -> None:
        choice = Choice(python(tmp_path / "all", "slow", SLOW), "slow")
        async with replica(tmp_path, choice) as server:
            server.stop.set()
            await server.load()  # which is answered while the model's process ends
            server.done.cancel()
            with pytest.raises(asyncio.CancelledError):
                await server.done
            with pytest.raises(ConnectionRefusedError):
                await server.load()

    run(main())


def test_model_processes_of_a_replica_may_open_as_many_files_as_the_system_allows(tmp_path: Path) -> None:
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)

    async def main() -> None:
        async with replica(tmp_path, Choice(double(tmp_path / "all"), "double")) as server:
            pid = (await server.load()).engine_pid
            assert resource.prlimit(pid, resource.RLIMIT_NOFILE) == (most, most)

    resource.setrlimit(resource.RLIMIT_NOFILE, (min(most, 1024), most))
    try:
        run(main())
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))


def test_replica_exits_with_the_reason_when_its_model_fails_to_load(tmp_path: Path) -> None:
    broken = "raise ValueError('no such weights')"

    async def main() -> None:
        async with replica(tmp_path, Choice(python(tmp_path / "all", "bad", broken), "bad"), ready=False):
            await asyncio.Event().wait()

    with pytest.raises(ExceptionGroup) as found:
        run(main())
    (gave_up,) = found.value.exceptions
    assert isinstance(gave_up, serve.GaveUp)
    assert "no such weights" in str(gave_up)


@pytest.mark.slow
def test_replica_exits_when_it_is_no_longer_polled(tmp_path: Path) -> None:
    async def main() -> None:
        async with replica(tmp_path, Choice(double(tmp_path / "all"), "double"), lease_s=2.0):
            await asyncio.Event().wait()

    with pytest.raises(ExceptionGroup) as found:
        run(main())
    (gave_up,) = found.value.exceptions
    assert isinstance(gave_up, serve.GaveUp)
    assert "polled its load for 2 s" in str(gave_up)


@pytest.mark.slow
def test_load_all_setting_loads_other_models_and_tolerates_their_failure(tmp_path: Path) -> None:
    repository = python(double(tmp_path / "all"), "bad", "raise ValueError('never')")

    async def main() -> None:
        async with replica(tmp_path, Choice(repository, "double"), settings={"load": "all"}) as server:
            assert (await server.ask(b"POST", INFER, tensor(1, 2, 3, 4))).status == 200

    run(main())


@pytest.mark.slow
def test_called_models_are_loaded_with_the_model(tmp_path: Path) -> None:
    said = 'parameters { key: "forebay.calls" value { string_value: "double" } }'
    repository = python(double(tmp_path / "all"), "caller", CALLING, said)

    async def main() -> None:
        async with replica(tmp_path, Choice(repository, "caller")) as server:
            got = await server.ask(b"POST", INFER, tensor(1, 2, 3, 4))
            assert msgspec.json.decode(got.body)["outputs"][0]["data"] == [2, 4, 6, 8]

    run(main())


def test_dropped_requests_are_counted_under_the_alias() -> None:
    shelf, metrics = FakeModels(), Metrics()
    aliased = AliasedModel(shelf, "mine", "echo", metrics, "mine-0", strict=True)
    aliased.dropped(InferRequest("mine", "", "7", ()))
    assert shelf.dropped_ids == ["7"]
    labels = b'{code="overloaded",endpoint="infer",model="mine",replica="mine-0"}'
    assert b"forebay_worker_requests_total%b 1.0\n" % labels in metrics.render()


def test_reworded_error_keeps_its_hint_when_to_retry() -> None:
    aliased = AliasedModel(FakeModels(), "mine", "echo", Metrics(), "mine-0", strict=True)
    reworded = aliased.reworded(Refused(Kind.UNAVAILABLE, "in ensemble 'echo', retry", 1))
    assert (reworded.text, reworded.retry_after_s) == ("in ensemble 'mine', retry", 1)


def test_ended_requests_leave_no_reference_cycles() -> None:
    class Calls(FakeModels):
        def infer(self, request: InferRequest, on_response: OnResponse) -> Ticket:
            ticket = super().infer(request, on_response)
            ticket.on_response = on_response  # type: ignore[attr-defined]  # as a call has it
            self.tickets.clear()
            return ticket

    class Asker:
        ticket: Ticket

        def hear(self, *_: object) -> None:
            """An answer."""

    async def main() -> None:
        aliased = AliasedModel(Calls(), "mine", "echo", Metrics(), "mine-0", strict=True)
        gc.disable()
        gone = []
        for cancels in (False, True):
            asker = Asker()
            asker.ticket = aliased.infer(InferRequest("mine", "", "7", ()), asker.hear)
            if cancels:
                asker.ticket.cancel()
            gone.append(weakref.ref(asker))
            del asker
            await asyncio.sleep(0)
        gc.enable()
        assert ([ref() for ref in gone], aliased.in_flight) == ([None, None], 0)

    run(main())


def test_replica_serves_grpc_when_configured(tmp_path: Path) -> None:
    async def main() -> None:
        choice = Choice(double(tmp_path / "all"), "double")
        (first,) = free_ports(1)
        async with replica(tmp_path, choice, settings={"grpc_port_first": first}) as server:
            assert (await server.load()).grpc_port == first
            async with grpc.InferenceServerClient(f"127.0.0.1:{first}") as client:
                given = grpc.InferInput("IN", [1, 4], "FP32")
                given.set_data_from_numpy(np.ones((1, 4), np.float32))
                got = await client.infer("mine", [given])
            assert got.as_numpy("OUT").tolist() == [[2.0] * 4]
            assert got.get_response().model_name == "mine"

    run(main())


def test_replica_without_a_free_port_exits_with_an_error(tmp_path: Path) -> None:
    async def main() -> None:
        choice = Choice(double(tmp_path / "all"), "double")
        spec = WorkerSpec(
            "mine-0", 1, "mine", "r", Task.TENSOR, "modelserver", "", str(tmp_path / "e"), port_first=65_536
        )
        with pytest.raises(NoPort, match="no free port"):
            await serve.run(spec, choice, LOG, asyncio.Event())

    run(main())
