"""`forebay serve --repository` under hostile conditions: stopped under load, killed, sent malformed tensors."""

import http.client
import json
import os
import random
import signal
import struct
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any

import httpx
from tests.e2e.cluster import REPO, alive, free_ports, wait_for
from tests.modelserver.models.rig import SAME, config, write

STOP_TIMEOUT_S = 60
NONSENSE = 10_000
FOR_EVER = """
    def initialize(self, args):
        (Path(args["model_repository"]) / "loading").touch()
        time.sleep(3600)
"""
SLOW = """
    def execute(self, requests):
        time.sleep(0.05)
        return [give(get(request)) for request in requests]
"""


class Serving:
    """A server process and where it answers."""

    def __init__(self, process: "subprocess.Popen[bytes]", port: int) -> None:
        self.process = process
        self.port = port

    def infer(self, model: str, value: float) -> httpx.Response:
        """One request of its own connection."""
        url = f"http://127.0.0.1:{self.port}/v2/models/{model}/infer"
        return httpx.post(url, content=_body(value), timeout=30)

    def children(self) -> list[int]:
        """The processes of models."""
        found = []
        for task in Path(f"/proc/{self.process.pid}/task").iterdir():
            with suppress(OSError):  # a thread that has ended meanwhile
                found += [int(pid) for pid in (task / "children").read_text().split()]
        return [pid for pid in found if b"process.child" in Path(f"/proc/{pid}/cmdline").read_bytes()]


@contextmanager
def serving(folder: Path, *options: str) -> Iterator[Serving]:
    """With the models `same` and `slow`; killed at the end unless it has ended."""
    models = folder / "models"
    write(models, "same", config(), SAME)
    write(models, "slow", config("dynamic_batching { }"), SLOW)
    http_port, grpc_port, metrics_port = free_ports(3)
    ports = [f"--http-port={http_port}", f"--grpc-port={grpc_port}", f"--metrics-port={metrics_port}"]
    command = [str(Path(sys.executable).with_name("forebay")), "serve", f"--repository={models}", *ports, *options]
    with (folder / "forebay.log").open("wb") as log:
        process = subprocess.Popen(command, cwd=REPO, stdout=log, stderr=log)
    ready = f"http://127.0.0.1:{http_port}/v2/health/ready"
    try:
        wait_for("Forebay is ready", lambda: httpx.get(ready).status_code == 200)
        yield Serving(process, http_port)
    finally:
        process.kill()
        process.wait(STOP_TIMEOUT_S)


def _body(value: float) -> bytes:
    inputs = [{"name": "IN", "datatype": "FP32", "shape": [1, 1], "data": [value]}]
    return json.dumps({"inputs": inputs}).encode()


def test_shutdown_under_load_answers_all_accepted_requests(tmp_path: Path) -> None:
    with serving(tmp_path) as server:
        answers: Counter[int | str] = Counter()
        enough = threading.Semaphore(0)

        def client(connection: http.client.HTTPConnection, model: str, value: float) -> None:
            while True:
                try:
                    if connection.sock is None:
                        connection.connect()
                except ConnectionRefusedError:
                    return  # it listens no more: nothing was accepted
                try:
                    connection.request("POST", f"/v2/models/{model}/infer", _body(value))
                    response = connection.getresponse()
                    data = json.loads(response.read())
                    right = response.status == 200 and data["outputs"][0]["data"] == [value]
                    answers["right" if right else response.status] += 1
                except (OSError, http.client.HTTPException) as error:
                    answers[repr(error)] += 1
                    connection.close()
                enough.release()

        connections = [http.client.HTTPConnection("127.0.0.1", server.port, timeout=30) for _ in range(8)]
        models = ["same", "slow"] * 4
        threads = [
            threading.Thread(target=client, args=(each, models[n], float(n))) for n, each in enumerate(connections)
        ]
        for thread in threads:
            thread.start()
        for _ in range(200):
            assert enough.acquire(timeout=30)
        server.process.terminate()
        for thread, connection in zip(threads, connections, strict=True):
            thread.join()
            connection.close()
        assert server.process.wait(STOP_TIMEOUT_S) == 0
        assert set(answers) == {"right"}, answers


def test_shutdown_aborts_a_load_that_hangs(tmp_path: Path) -> None:
    write(tmp_path / "models", "hangs", config(), FOR_EVER)
    explicit = ("--model-control-mode=explicit", "--load-model=same", "--exit-timeout-secs=600")
    with serving(tmp_path, *explicit) as server, ThreadPoolExecutor() as threads:
        url = f"http://127.0.0.1:{server.port}/v2/repository/models/hangs/load"
        load = threads.submit(httpx.post, url, json={}, timeout=2 * STOP_TIMEOUT_S)
        try:
            wait_for("it is being loaded", (tmp_path / "models/hangs/loading").exists)
            server.process.terminate()
            assert server.process.wait(STOP_TIMEOUT_S) == 0
        finally:
            server.process.kill()
        assert load.result().status_code == 400


def test_killed_server_leaves_no_model_processes(tmp_path: Path) -> None:
    with serving(tmp_path) as server:
        assert server.infer("same", 1).status_code == 200
        pids = server.children()
        assert len(pids) >= 2
        server.process.send_signal(signal.SIGKILL)
        server.process.wait(STOP_TIMEOUT_S)
        wait_for("its models end", lambda: not any(map(alive, pids)))


def test_server_and_model_processes_use_batch_scheduling(tmp_path: Path) -> None:
    with serving(tmp_path) as server:
        assert {os.sched_getscheduler(pid) for pid in (server.process.pid, *server.children())} == {os.SCHED_BATCH}


def test_killed_model_processes_are_replaced(tmp_path: Path) -> None:
    with serving(tmp_path) as server:
        for pid in server.children():
            os.kill(pid, signal.SIGKILL)
        for model in ("same", "slow"):
            wait_for(f"{model} serves again", partial(_serves, server, model))


def _serves(server: Serving, model: str) -> bool:
    return server.infer(model, 2).status_code == 200


def test_malformed_binary_tensors_get_client_errors(tmp_path: Path) -> None:
    rng = random.Random(5)
    with (
        serving(tmp_path) as server,
        closing(http.client.HTTPConnection("127.0.0.1", server.port, timeout=30)) as connection,
    ):
        statuses: Counter[int] = Counter()
        for _ in range(NONSENSE):
            document, data = _nonsense(rng)
            length = rng.choice([len(document)] * 9 + [0, -1, len(document) + len(data) + 1, 10**30])
            headers = {"Inference-Header-Content-Length": str(length)}
            connection.request("POST", "/v2/models/same/infer", document + data, headers)
            response = connection.getresponse()
            response.read()
            statuses[response.status] += 1
        assert all(status < 500 for status in statuses), statuses
        assert statuses[400] > NONSENSE / 2
        assert server.infer("same", 3).status_code == 200


def _nonsense(rng: random.Random) -> tuple[bytes, bytes]:
    odd: list[Any] = [0, 1, -1, 4, 2**31, 2**63, 2**64, 10**30, 1.5, "x", None, True, [], {}]
    data = rng.randbytes(rng.choice([0, 4, 16, 17, 4096]))
    if rng.random() < 0.3:
        data = struct.pack("<I", rng.choice([0, 4, len(data), 2**32 - 1])) + data
    tensor = {
        "name": rng.choice(["IN", "IN", "IN", "OUT", 5]),
        "datatype": rng.choice(["FP32", "FP32", "BYTES", "BF16", "BOOL", "FP8", None]),
        "shape": rng.choice([[1, 4], [rng.choice(odd) for _ in range(rng.randrange(4))], rng.choice(odd)]),
        "parameters": {"binary_data_size": rng.choice([len(data), len(data), *odd])},
    }
    outputs = [{"name": "OUT", "parameters": {"binary_data": rng.choice(odd), "classification": rng.choice(odd)}}]
    document = {"inputs": [tensor] * rng.choice([0, 1, 1, 1, 2]), "outputs": outputs * rng.choice([0, 0, 1])}
    text = bytearray(json.dumps(document).encode())
    if rng.random() < 0.1:
        text[rng.randrange(len(text))] = rng.randrange(256)
    return bytes(text), data
