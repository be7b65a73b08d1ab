"""Tensor models in a real cluster: their clients, faults under load, reloads, and other tasks beside them."""

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
import tritonclient.http as triton
from tests.e2e.cluster import CHAT, EMBED, Cluster, alive, running, wait_for
from tests.modelserver.replica.models import double, python
from tritonclient.utils import InferenceServerException

CLIENTS = 6
SUMS = """
import numpy as np
import triton_python_backend_utils as pb

class TritonPythonModel:
    def initialize(self, args):
        self.sums = {}

    def execute(self, requests):
        return [self.answer(request) for request in requests]

    def answer(self, request):
        id = int(pb.get_input_tensor_by_name(request, "ID").as_numpy().reshape(-1)[0])
        start = int(pb.get_input_tensor_by_name(request, "START").as_numpy().reshape(-1)[0])
        given = pb.get_input_tensor_by_name(request, "IN").as_numpy()
        self.sums[id] = given if start else self.sums[id] + given
        return pb.InferenceResponse([pb.Tensor("OUT", self.sums[id])])
"""
CONTROLS = """
sequence_batching { max_sequence_idle_microseconds: 60000000 direct { } control_input [
  { name: "START" control [ { kind: CONTROL_SEQUENCE_START int32_false_true: [0, 1] } ] },
  { name: "ID" control [ { kind: CONTROL_SEQUENCE_CORRID data_type: TYPE_UINT64 } ] } ] }
"""
FRAGILE = """
import triton_python_backend_utils as pb

class TritonPythonModel:
    def execute(self, requests):
        return [self.answer(request) for request in requests]

    def answer(self, request):
        given = pb.get_input_tensor_by_name(request, "IN").as_numpy()
        return pb.InferenceResponse([pb.Tensor("OUT", given + given)])
"""

RANKS = """
import numpy as np
import triton_python_backend_utils as pb

class TritonPythonModel:
    def execute(self, requests):
        return [self.answer(request) for request in requests]

    def answer(self, request):
        documents = pb.get_input_tensor_by_name(request, "DOCUMENT").as_numpy().ravel()
        scores = np.array([[len(each)] for each in documents], np.float32)
        return pb.InferenceResponse([pb.Tensor("SCORE", scores)])
"""
RANKS_IO = """
input { name: "QUERY" data_type: TYPE_STRING dims: [1] }
input { name: "DOCUMENT" data_type: TYPE_STRING dims: [1] }
output { name: "SCORE" data_type: TYPE_FP32 dims: [1] }
parameters { key: "forebay.task" value { string_value: "rerank" } }
dynamic_batching { }
"""


def model(name: str, repository: Path, **more: Any) -> dict[str, Any]:
    return {"name": name, "task": "tensor", "source": str(repository), **more}


def infer(client: Any, name: str, value: float, *, binary: bool = True, **more: Any) -> Any:
    given = triton.InferInput("IN", [1, 4], "FP32")
    given.set_data_from_numpy(np.full((1, 4), value, np.float32), binary_data=binary)
    wanted = triton.InferRequestedOutput("OUT", binary_data=binary)
    return client.infer(name, [given], outputs=[wanted], **more).as_numpy("OUT")[0, 0]


@contextmanager
def asking(cluster: Cluster, name: str) -> Iterator[list[str]]:
    """Clients in a loop around the block; afterwards the list holds whatever went wrong for any of them."""
    failures: list[str] = []
    over = threading.Event()

    def ask(number: int) -> int:
        done = 0
        with triton.InferenceServerClient(cluster.url.removeprefix("http://"), network_timeout=120) as client:
            while not over.is_set():
                value = float(done % 1000 * CLIENTS + number)
                try:
                    found = infer(client, name, value, binary=bool(done % 2))
                    if found != 2 * value:
                        failures.append(f"{found} instead of {2 * value}")
                except Exception as error:  # whatever it is, a client has seen it
                    failures.append(f"{type(error).__name__}: {error}")
                done += 1
        return done

    with ThreadPoolExecutor(CLIENTS) as pool:
        counts = [pool.submit(ask, number) for number in range(CLIENTS)]
        try:
            yield failures
        finally:
            over.set()
        assert all(count.result() > 0 for count in counts)


def children(pid: int) -> list[int]:
    """The processes of a replica's models."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                parent = int((entry / "stat").read_text().rsplit(")", 1)[1].split()[1])
                if parent == pid and b"process.child" in (entry / "cmdline").read_bytes():
                    found.append(int(entry.name))
            except OSError:
                continue
    return found


@pytest.fixture(scope="module")
def tensors(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """Two replicas of each model."""
    folder = tmp_path_factory.mktemp("tensors")
    repository = python(python(double(folder / "all"), "sums", SUMS, CONTROLS), "fragile", FRAGILE)
    python(repository, "ranks-by-length", RANKS, io=RANKS_IO)
    models = [
        model("ranks", repository, engine={"name": "modelserver", "model": "ranks-by-length"}),
        model("twice", repository, replicas=2, engine={"name": "modelserver", "model": "double"}),
        model("sums", repository, replicas=2, routing="round_robin"),
        model("fragile", repository, replicas=2),
    ]
    with running(folder, "e2e-tensor", models) as cluster:
        yield cluster


@pytest.fixture
def client(tensors: Cluster) -> Iterator[Any]:
    tensors.wait_ready(120)
    with triton.InferenceServerClient(tensors.url.removeprefix("http://"), network_timeout=120) as client:
        yield client


def test_triton_clients_work_against_a_cluster(client: Any) -> None:
    assert client.is_server_live()
    assert client.is_server_ready()
    assert client.is_model_ready("twice")
    assert not client.is_model_ready("none")
    assert [each["name"] for each in client.get_model_repository_index()] == ["fragile", "ranks", "sums", "twice"]
    assert client.get_model_metadata("twice")["name"] == "twice"
    assert client.get_model_config("twice", "1")["max_batch_size"] == 8

    for more in ({}, {"model_version": "1"}, {"request_compression_algorithm": "gzip"}, {"binary": False}):
        assert infer(client, "twice", 3.0, **more) == 6.0
    assert infer(client, "twice", 4.0, response_compression_algorithm="deflate") == 8.0
    assert client.get_inference_statistics("twice")["model_stats"][0]["name"] == "twice"

    for wrong in (
        lambda: infer(client, "none", 1.0),
        lambda: infer(client, "twice", 1.0, model_version="9"),
        lambda: client.load_model("twice"),
        lambda: client.unload_model("twice"),
    ):
        with pytest.raises(InferenceServerException):
            wrong()


def test_concurrent_requests_equal_single_ones(tensors: Cluster, client: Any) -> None:
    with ThreadPoolExecutor(8) as pool:

        def ask(number: int) -> float:
            body = {"inputs": [{"name": "IN", "shape": [1, 4], "datatype": "FP32", "data": [number] * 4}]}
            answer = httpx.post(f"{tensors.url}/v2/models/twice/infer", json=body, timeout=60)
            return float(answer.json()["outputs"][0]["data"][0])

        assert list(pool.map(ask, range(64))) == [2.0 * number for number in range(64)]


def test_sequence_requests_stay_on_the_replica_with_their_state(client: Any) -> None:
    for id in range(1, 9):
        sums = [
            infer(client, "sums", 1.0, sequence_id=id, sequence_start=step == 0, sequence_end=step == 4)
            for step in range(5)
        ]
        assert sums == [1.0, 2.0, 3.0, 4.0, 5.0]


def test_task_endpoint_answers_under_the_cluster_model_name(tensors: Cluster, client: Any) -> None:
    def ask(number: int) -> list[int]:
        documents = ["x" * (1 + (number + step) % 20) for step in range(20)]
        body = {"model": "ranks", "query": "long", "documents": documents, "top_n": 2}
        answer = httpx.post(f"{tensors.url}/v1/rerank", json=body, timeout=60)
        assert answer.json()["model"] == "ranks"
        return [len(documents[each["index"]]) for each in answer.json()["results"]]

    with ThreadPoolExecutor(8) as pool:
        assert list(pool.map(ask, range(16))) == [[20, 19]] * 16
    wrong = httpx.post(
        f"{tensors.url}/v1/rerank", json={"model": "twice", "query": "q", "documents": ["d"]}, timeout=60
    )
    assert (wrong.status_code, wrong.json()["error"]["code"]) == (400, "wrong_task")


def test_killed_replica_under_load_fails_no_request(tensors: Cluster, client: Any) -> None:
    before = tensors.ready_replicas("twice")
    with asking(tensors, "twice") as failures:
        os.kill(before[0]["pid"], signal.SIGKILL)
        wait_for(
            "another generation",
            lambda: (
                {r["generation"] for r in tensors.ready_replicas("twice")} != {r["generation"] for r in before}
                and len(tensors.ready_replicas("twice")) == 2
            ),
        )
    assert failures == []


def test_killed_model_process_under_load_fails_no_request(tensors: Cluster, client: Any) -> None:
    (pid, *_) = (replica["pid"] for replica in tensors.ready_replicas("fragile"))
    with asking(tensors, "fragile") as failures:
        for _ in range(3):
            killed = wait_for("a process of the model", lambda: children(pid))
            os.kill(killed[0], signal.SIGKILL)
            wait_for("another one", lambda old=killed: [each for each in children(pid) if each not in old])
    assert failures == []


def test_model_processes_end_with_their_killed_replica(tensors: Cluster, client: Any) -> None:
    pid = tensors.ready_replicas("fragile")[1]["pid"]
    (orphan, *_) = children(pid)
    os.kill(pid, signal.SIGKILL)

    wait_for("the end of its model", lambda: not alive(orphan))


def test_reload_replaces_a_changed_model_under_load(tmp_path: Path) -> None:
    repository = double(tmp_path / "all")
    with running(tmp_path, "e2e-tensor-reload", [model("double", repository, replicas=2)]) as cluster:
        before = {replica["pid"] for replica in cluster.ready_replicas("double")}
        with asking(cluster, "double") as failures:
            (repository / "double" / "config.pbtxt").write_text("max_batch_size: 16\ndynamic_batching { }\n")
            done = subprocess.run(
                [sys.executable, "-m", "forebay.cli.main", "reload", "--url", cluster.admin],
                env={**os.environ, "NO_COLOR": "1"},
                capture_output=True,
                check=False,
                timeout=120,
            )
            assert done.returncode == 0, done.stderr
            wait_for("new replicas", lambda: not before & {r["pid"] for r in cluster.ready_replicas("double")})
        wait_for("the old ones are gone", lambda: not any(map(alive, before)))
        wait_for("two ready", lambda: len(cluster.ready_replicas("double")) == 2)
        url = f"{cluster.url}/v2/models/double/config"
        wait_for("a new one answers", lambda: httpx.get(url, timeout=60).json().get("max_batch_size") == 16)
    assert failures == []


def test_chat_embedding_and_tensor_models_share_a_cluster(tmp_path: Path) -> None:
    models = [CHAT, EMBED, model("double", double(tmp_path / "all"))]
    with running(tmp_path, "e2e-three-tasks", models) as cluster, cluster.client() as client:
        chat = client.chat.completions.create(
            model="chat", messages=[{"role": "user", "content": "Say hello."}], max_tokens=4
        )
        assert chat.choices[0].message.content
        assert client.embeddings.create(model="embed", input="turbines").data[0].embedding
        assert {each.id for each in client.models.list()} == {"chat", "embed", "double"}
        with triton.InferenceServerClient(cluster.url.removeprefix("http://"), network_timeout=120) as tensors:
            assert infer(tensors, "double", 21.0) == 42.0
            with pytest.raises(InferenceServerException, match="serves chat requests"):
                infer(tensors, "chat", 1.0)
