"""`forebay serve --repository` as a process, under Triton's own clients, unmodified."""

import asyncio
import json
import queue
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
from tests.e2e.cluster import wait_for

from forebay.cli.conformance import repository

grpcclient = pytest.importorskip("tritonclient.grpc")
grpcaio = pytest.importorskip("tritonclient.grpc.aio")
httpclient = pytest.importorskip("tritonclient.http")
shm = pytest.importorskip("tritonclient.utils.shared_memory")
utils = pytest.importorskip("tritonclient.utils")

START_S = 60.0
DTYPES = ["?", "u1", "u2", "u4", "u8", "i1", "i2", "i4", "i8", "f2", "f4", "f8", "O"]


class Served:
    """A server process and its addresses."""

    def __init__(self, folder: Path, *options: str) -> None:
        self.output = folder / "output"
        command = [sys.executable, "-m", "forebay.cli.main", "serve", "--repository", str(folder / "models")]
        ports = ["--http-port", "0", "--grpc-port", "0", "--metrics-port", "0"]
        with self.output.open("wb") as output:
            self.process = subprocess.Popen([*command, *ports, *options], stdout=output, stderr=subprocess.STDOUT)
        self.http = self._find(r"HTTP +http://(\S+)/v2")
        self.grpc = self._find(r"gRPC +(\S+)")
        self.metrics = self._find(r"metrics +(\S+)")

    def _find(self, pattern: str) -> str:
        deadline = time.monotonic() + START_S
        while (found := re.search(pattern, self.output.read_text())) is None:
            assert self.process.poll() is None, self.output.read_text()
            assert time.monotonic() < deadline, self.output.read_text()
            time.sleep(0.05)
        return found[1]

    def stop(self) -> int:
        """Ask it to stop; its exit code."""
        self.process.send_signal(signal.SIGTERM)
        return self.process.wait(40)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = Path(tmp_path_factory.mktemp("triton"))
    repository.write(made / "models")
    return made


@pytest.fixture(scope="module")
def served(folder: Path) -> Iterator[Served]:
    loads = [word for name in ("add_sub", "types", "repeat", "speak") for word in ("--load-model", name)]
    server = Served(
        folder, "--model-control-mode", "explicit", *loads, "--trace-config", f"triton,file={folder}/trace"
    )
    yield server
    assert server.stop() == 0


def array(dtype: str) -> Any:
    if dtype == "O":
        return np.array([b"word", b"\xff\x00"], dtype=object)
    return np.array([1, 0], dtype)


@pytest.mark.parametrize("dtype", DTYPES)
def test_every_datatype_round_trips_over_both_protocols(served: Served, dtype: str) -> None:
    given = array(dtype)
    datatype = utils.np_to_triton_dtype(given.dtype)
    for module, url in ((httpclient, served.http), (grpcclient, served.grpc)):
        with module.InferenceServerClient(url) as client:
            tensor = module.InferInput(f"IN_{datatype}", [2], datatype)
            tensor.set_data_from_numpy(given)
            wanted = [module.InferRequestedOutput(f"OUT_{datatype}")]
            result = client.infer("types", [tensor], outputs=wanted)
            assert np.array_equal(result.as_numpy(f"OUT_{datatype}"), given)


@pytest.mark.parametrize("dtype", ["f4", "u1", "O"])
@pytest.mark.parametrize("module", [httpclient, grpcclient], ids=["http", "grpc"])
def test_large_tensors_of_concurrent_requests_round_trip(served: Served, module: Any, dtype: str) -> None:
    url = served.http if module is httpclient else served.grpc

    def ask(number: int) -> None:
        given = np.arange(number, number + 150_001) % 251
        given = np.array([b"%d" % each for each in given], object) if dtype == "O" else given.astype(dtype)
        datatype = utils.np_to_triton_dtype(given.dtype)
        with module.InferenceServerClient(url) as client:
            tensor = module.InferInput(f"IN_{datatype}", [len(given)], datatype)
            tensor.set_data_from_numpy(given)
            for _ in range(3):
                result = client.infer("types", [tensor], request_id="x" * number)
                assert np.array_equal(result.as_numpy(f"OUT_{datatype}"), given)

    with ThreadPoolExecutor(4) as threads:
        list(threads.map(ask, range(4)))


def pair(module: Any) -> tuple[Any, Any, list[Any]]:
    a, b = np.arange(4, dtype="f4").reshape(1, 4), np.ones((1, 4), "f4")
    inputs = [module.InferInput(name, [1, 4], "FP32") for name in ("IN0", "IN1")]
    for tensor, data in zip(inputs, (a, b), strict=True):
        tensor.set_data_from_numpy(data)
    return a, b, inputs


def test_the_asynchronous_client_infers(served: Served) -> None:
    async def main() -> None:
        async with grpcaio.InferenceServerClient(served.grpc) as client:
            a, b, inputs = pair(grpcaio)
            results = await asyncio.gather(*(client.infer("add_sub", inputs, request_id=str(n)) for n in range(50)))
            assert [result.get_response().id for result in results] == [str(n) for n in range(50)]
            assert all(np.array_equal(result.as_numpy("OUT0"), a + b) for result in results)

    asyncio.run(main())


@pytest.mark.parametrize("module", [httpclient, grpcclient], ids=["http", "grpc"])
def test_tensors_pass_through_shared_memory(served: Served, module: Any) -> None:
    url = served.http if module is httpclient else served.grpc
    a, b, inputs = pair(module)
    region = shm.create_shared_memory_region("part", "/forebay-e2e", 64)
    try:
        shm.set_shared_memory_region(region, [a, b])
        with module.InferenceServerClient(url) as client:
            client.register_system_shared_memory("part", "/forebay-e2e", 64)
            inputs[0].set_shared_memory("part", 16)
            inputs[1].set_shared_memory("part", 16, offset=16)
            output = module.InferRequestedOutput("OUT0")
            output.set_shared_memory("part", 16, offset=32)
            client.infer("add_sub", inputs, outputs=[output])
            found = shm.get_contents_as_numpy(region, np.float32, [1, 4], offset=32)
            assert np.array_equal(found, a + b)
            del found
            client.unregister_system_shared_memory()
            with pytest.raises(utils.InferenceServerException, match="Unable to find shared memory region: 'part'"):
                client.infer("add_sub", inputs)
    finally:
        shm.destroy_shared_memory_region(region)


def test_decoupled_model_answers_on_a_stream(served: Served) -> None:
    answers: queue.Queue[Any] = queue.Queue()
    with grpcclient.InferenceServerClient(served.grpc) as client:
        client.start_stream(lambda result, error: answers.put(error or result))
        count = grpcclient.InferInput("COUNT", [1], "INT32")
        count.set_data_from_numpy(np.array([3], "i4"))
        client.async_stream_infer("repeat", [count], request_id="9", enable_empty_final_response=True)
        found = [answers.get(timeout=20) for _ in range(4)]
        client.stop_stream()
    assert [result.as_numpy("OUT").tolist() for result in found[:3]] == [[0], [1], [2]]
    finals = [result.get_response().parameters["triton_final_response"].bool_param for result in found]
    assert finals == [False, False, False, True]


def test_generation_is_streamed_over_http(served: Served) -> None:
    answer = httpx.post(
        f"http://{served.http}/v2/models/speak/generate_stream", json={"text_input": "hello there"}, timeout=20
    )
    events = [json.loads(line[6:]) for line in answer.text.splitlines() if line.startswith("data: ")]
    assert [event["text_output"] for event in events] == ["hello", "there"]


@pytest.mark.parametrize("module", [httpclient, grpcclient], ids=["http", "grpc"])
def test_models_are_loaded_and_unloaded_by_the_repository_api(served: Served, module: Any) -> None:
    url = served.http if module is httpclient else served.grpc
    with module.InferenceServerClient(url) as client:
        client.load_model("plain")
        assert client.is_model_ready("plain")
        client.unload_model("plain")
        assert not client.is_model_ready("plain")
        with pytest.raises(utils.InferenceServerException):
            client.load_model("bad_syntax")
        assert client.is_server_live()


def test_traces_and_metrics_cover_requests(served: Served, folder: Path) -> None:
    with httpclient.InferenceServerClient(served.http) as client:
        client.update_trace_settings(settings={"trace_level": ["TIMESTAMPS"], "trace_rate": "1", "trace_count": "1"})
        client.infer("add_sub", pair(httpclient)[2], request_id="traced")
        client.update_trace_settings(settings={"trace_level": None, "trace_rate": None, "trace_count": None})

    def traced() -> list[dict[str, Any]]:
        try:
            return list(json.loads((folder / "trace.0").read_bytes()))
        except (FileNotFoundError, json.JSONDecodeError):  # it is there before it is written
            return []

    told = wait_for("a trace", traced)  # the times of the front stand before the head
    assert [each["request_id"] for each in told if "request_id" in each] == ["traced"]
    for url in (served.metrics, f"http://{served.http}/metrics"):
        assert 'nv_inference_request_success{model="add_sub",version="1"}' in httpx.get(url, timeout=20).text


def test_shutdown_finishes_running_requests(folder: Path) -> None:
    server = Served(folder, "--model-control-mode", "explicit", "--load-model", "repeat")

    async def main() -> list[int]:
        seen: list[int] = []
        async with grpcaio.InferenceServerClient(server.grpc) as client:

            async def requests() -> Any:
                inputs = []
                for name, value in (("COUNT", 10), ("WAIT_MS", 50)):
                    inputs.append(grpcaio.InferInput(name, [1], "INT32"))
                    inputs[-1].set_data_from_numpy(np.array([value], "i4"))
                yield {"model_name": "repeat", "inputs": inputs}

            async for result, error in client.stream_infer(requests()):
                assert error is None
                seen.append(int(result.as_numpy("OUT")[0]))
                if len(seen) == 1:
                    server.process.send_signal(signal.SIGTERM)
        return seen

    assert asyncio.run(main()) == list(range(10))
    assert server.process.wait(40) == 0


STUCK = """
import time
from pathlib import Path
class TritonPythonModel:
    def execute(self, requests):
        Path({sign!r}).touch()
        time.sleep(100)
"""


def test_shutdown_answers_requests_that_do_not_finish_in_time(tmp_path: Path) -> None:
    sign, version = tmp_path / "sign", tmp_path / "models/stuck/1"
    version.mkdir(parents=True)
    (version / "model.py").write_text(STUCK.format(sign=str(sign)))
    tensors = "".join(f'{kind} {{ name: "T" data_type: TYPE_FP32 dims: [ 1 ] }}\n' for kind in ("input", "output"))
    (version.parent / "config.pbtxt").write_text(f'backend: "python"\n{tensors}')
    server = Served(tmp_path, "--exit-timeout-secs", "1")
    body = {"inputs": [{"name": "T", "datatype": "FP32", "shape": [1], "data": [1]}]}
    with ThreadPoolExecutor(1) as threads:
        asked = threads.submit(httpx.post, f"http://{server.http}/v2/models/stuck/infer", json=body, timeout=40)
        wait_for("it runs", sign.exists)
        assert server.stop() == 0
        assert asked.result().status_code == 503


def test_unloadable_model_stops_the_start_unless_configured_otherwise(folder: Path) -> None:
    options = ("--model-control-mode", "explicit", "--load-model", "bad_syntax")
    with pytest.raises(AssertionError, match="Nothing is served"):
        Served(folder, *options)
    server = Served(folder, *options, "--exit-on-error=false")
    assert httpx.get(f"http://{server.http}/v2/health/live", timeout=20).status_code == 200
    assert httpx.get(f"http://{server.http}/v2/health/ready", timeout=20).status_code == 400
    assert server.stop() == 0
