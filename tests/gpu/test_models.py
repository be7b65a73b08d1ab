"""Models of all backends on a real GPU: right answers, their own place, faults, and memory that comes back."""

import json
import os
import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
from tests.e2e.cluster import wait_for
from tests.e2e.triton.served import Served, serving
from tests.gpu import models

from forebay.core.health import DeviceReading
from forebay.engines.tensor.gpus import computing
from forebay.providers.devices.nvml import NvmlSource

ROWS = np.random.default_rng(7).standard_normal((3, models.SIZE)).astype(np.float32)
ONNX = "onnxruntime" in computing()
GIB = 2**30


@pytest.fixture(scope="module")
def repository(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("gpu") / "models"
    models.write(folder)
    if ONNX:
        models.write_onnx(folder)
    return folder


@pytest.fixture(scope="module")
def served(repository: Path) -> Iterator[Served]:
    log = repository.with_name("forebay.log")
    with serving(repository, log, {"host": "127.0.0.1", "model-control-mode": "explicit"}) as found:
        yield found
    print(log.read_text()[-4000:])


def load(served: Served, name: str, act: str = "load") -> None:
    answer = httpx.post(f"{served.url}/v2/repository/models/{name}/{act}", json={}, timeout=120)
    assert answer.status_code == 200, answer.text


def ask(served: Served, name: str, rows: Any, datatype: str = "FP32") -> httpx.Response:
    tensor = {
        "name": "INPUT__0",
        "datatype": datatype,
        "shape": list(np.shape(rows)),
        "data": np.ravel(rows).tolist(),
    }
    return httpx.post(f"{served.url}/v2/models/{name}/infer", json={"inputs": [tensor]}, timeout=60)


def outputs(answer: httpx.Response) -> dict[str, Any]:
    assert answer.status_code == 200, answer.text
    return {each["name"]: each["data"] for each in answer.json()["outputs"]}


def is_right(answer: httpx.Response, error: float = 1e-5) -> None:
    """In FP32, but for ONNX Runtime, which computes with TF32's 10 bits where it may."""
    expected = ROWS.astype(np.float64) @ models.WEIGHTS + 1
    found = np.array(outputs(answer)["OUTPUT__0"]).reshape(ROWS.shape)
    assert np.linalg.norm(found - expected) < error * np.linalg.norm(expected)


def used_bytes() -> int:
    """What is used of the first GPU."""
    return _reading().memory_used_bytes or 0


@pytest.mark.parametrize(
    "name",
    ["matrix", "exported", "matrix_cpu", *(["matrix_onnx", "matrix_onnx_fp32", "matrix_onnx_cpu"] if ONNX else [])],
)
def test_a_model_answers_as_it_should_from_where_it_is_and_leaves_nothing_behind(served: Served, name: str) -> None:
    before = used_bytes()
    load(served, name)
    with ThreadPoolExecutor(8) as askers:
        for answer in askers.map(lambda _: ask(served, name, ROWS), range(40)):
            is_right(answer, 1e-3 if name == "matrix_onnx" else 1e-5)
    taken = used_bytes() - before
    assert (taken < 50e6) if name.endswith("_cpu") else (taken > 100e6), f"{taken:,} bytes of the GPU"
    group = httpx.get(f"{served.url}/v2/models/{name}/config").json()["instance_group"][0]
    assert (group["kind"], group["gpus"]) == (("KIND_CPU", []) if name.endswith("_cpu") else ("KIND_GPU", [0]))
    load(served, name, "unload")
    wait_for("the memory is free again", lambda: used_bytes() < before + 50e6)


def test_large_rows_of_many_batches_come_back_to_who_has_sent_them(served: Served) -> None:
    load(served, "wide")

    def doubled(number: int) -> bool:
        row = np.arange(models.WIDE, dtype=np.float32) + number
        size = {"binary_data_size": row.nbytes}
        tensor = {"name": "INPUT__0", "datatype": "FP32", "shape": [1, row.size], "parameters": size}
        head = json.dumps({"inputs": [tensor], "parameters": {"binary_data_output": True}}).encode()
        length = "inference-header-content-length"
        url = f"{served.url}/v2/models/wide/infer"
        answer = httpx.post(url, content=head + row.tobytes(), headers={length: str(len(head))}, timeout=60)
        assert answer.status_code == 200, answer.text
        return np.array_equal(np.frombuffer(answer.content[int(answer.headers[length]) :], np.float32), row * 2)

    with ThreadPoolExecutor(16) as askers:
        assert all(askers.map(doubled, range(200)))
    found = httpx.get(f"{served.url}/v2/models/wide/stats").json()["model_stats"][0]
    assert found["execution_count"] < found["inference_count"] == 200


def test_a_python_model_learns_where_it_is_and_its_tensors_may_be_there(served: Served) -> None:
    load(served, "told")
    found = outputs(ask(served, "told", ROWS))
    assert np.allclose(np.array(found["OUTPUT__0"]).reshape(ROWS.shape), ROWS * 2)
    told = json.loads(found["TOLD"][0])
    assert (told["kind"], told["seen"]) == ("GPU", "0")


def test_instances_on_a_cpu_and_on_a_gpu_serve_one_model(served: Served) -> None:
    load(served, "mixed")
    with ThreadPoolExecutor(8) as askers:
        answers = [outputs(each) for each in askers.map(lambda _: ask(served, "mixed", ROWS), range(100))]
    told = [json.loads(each["TOLD"][0]) for each in answers]
    assert {each["kind"] for each in told} == {"CPU", "GPU"}
    assert len({each["pid"] for each in told}) == 2
    assert all(np.allclose(np.array(each["OUTPUT__0"]).reshape(ROWS.shape), ROWS * 2) for each in answers)


def test_a_fault_on_the_gpu_costs_its_batch_and_not_the_model(served: Served) -> None:
    load(served, "table")
    good = np.array(outputs(ask(served, "table", [[3]], "INT64"))["OUTPUT__0"])
    assert np.allclose(good, models.WEIGHTS[3])
    for _ in range(2):
        fault = ask(served, "table", [[10_000]], "INT64")
        assert fault.status_code == 500
        assert "assert" in fault.text
        again = wait_for("it answers again", lambda: _ok(ask(served, "table", [[5]], "INT64")), 60)
        assert np.allclose(np.array(outputs(again)["OUTPUT__0"]), models.WEIGHTS[5])


def test_who_wants_more_than_its_share_is_refused_and_goes_on(served: Served) -> None:
    load(served, "greedy")
    assert ask(served, "greedy", [[GIB]], "INT64").status_code == 200
    refused = ask(served, "greedy", [[40 * GIB]], "INT64")
    assert refused.status_code == 500
    assert "out of memory" in refused.text
    assert ask(served, "greedy", [[GIB]], "INT64").status_code == 200


def test_a_process_that_is_killed_in_the_middle_gives_its_memory_back_and_is_replaced(
    served: Served, repository: Path
) -> None:
    load(served, "busy")
    file, begun = repository / "busy/1/pid", repository / "busy/1/begun"
    first = file.read_text()
    with ThreadPoolExecutor(1) as askers:
        asked = askers.submit(ask, served, "busy", ROWS[:1])
        wait_for("it has begun", lambda: begun.exists() and begun.read_text())
        wait_for("it computes", lambda: _reading().duty)
        os.kill(int(first), signal.SIGKILL)
        assert asked.result().status_code == 503
    wait_for("another process has it", lambda: file.read_text() not in ("", first))
    wait_for("it is ready", lambda: httpx.get(f"{served.url}/v2/models/busy/ready").status_code == 200)
    before = used_bytes()
    load(served, "busy", "unload")
    wait_for("the memory of both is free", lambda: used_bytes() < before - 100e6)


def test_metrics_tell_of_the_gpu(served: Served) -> None:
    def shown() -> dict[str, float]:
        lines = [each for each in httpx.get(served.metrics).text.splitlines() if "gpu_uuid=" in each]
        assert all('{gpu_uuid="GPU-' in each for each in lines)
        return {each.partition("{")[0]: float(each.rpartition(" ")[2]) for each in lines}

    found = wait_for("there are readings", shown)
    assert found["nv_gpu_memory_total_bytes"] > found["nv_gpu_memory_used_bytes"] > 0
    assert 0 <= found["nv_gpu_utilization"] <= 1
    assert 0 < found["nv_gpu_power_usage"] < 2 * found["nv_gpu_power_limit"]
    assert found["nv_energy_consumption"] >= 0


def _ok(answer: httpx.Response) -> httpx.Response | None:
    return answer if answer.status_code == 200 else None


def _reading() -> DeviceReading:
    source = NvmlSource(lambda: 0.0)
    try:
        return source.readings()[0]
    finally:
        source.close()
