"""What is left of a GPU behind Forebay's model server: its throughput beside PyTorch alone, in one run on one GPU.

    python bench/gpu/run.py [--rounds 3] [--window 3] [--only encoder,image]

`bare` is a loop of full batches of the same TorchScript file: rows from ordinary memory to the GPU, the model, its
output back. Forebay serves that file with one and with two instances, whose batches overlap, to a load generator in
C: binary tensors over HTTP, and pictures in system shared memory, too, where a request only names them. `closed`
keeps four batches of requests under way; that is the throughput. `open` asks for 70 % of it, evenly spaced, and
latency counts from the instant each request was due. Bare runtime and server take turns of seconds, and a ratio is
that of two neighbours. Results go to results.json. It needs a GPU of NVIDIA's, a PyTorch built with CUDA, gcc, and
six cores or more; the load generator takes the last two of those that it may use. Forebay is measured as it is
imported: with `PYTHONPATH=build/compiled`, it is compiled.
"""

import argparse
import contextlib
import json
import os
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from multiprocessing.shared_memory import SharedMemory
from pathlib import Path
from typing import Final, NamedTuple

import httpx
import numpy as np
import torch
from models import BATCH, MODELS, Model

sys.path.append(str(Path(__file__).parents[1] / "gateway"))
from processes import machine, started

HERE: Final = Path(__file__).parent
UNDER_WAY: Final = 4 * BATCH
SHARE: Final = 0.7
"""Open loop: of the throughput that the closed one has found."""
LOAD_CORES: Final = 2
INSTANCES: Final = (1, 2)
WARMUP_S: Final = 1.0
START_TIMEOUT_S: Final = 180.0
REGION: Final = "pictures"
Run = dict[str, float]


class Load(NamedTuple):
    """The load generator, and where it runs."""

    program: Path
    cores: Sequence[int]


def free_port() -> int:
    """A port that was free a moment ago."""
    with socket.socket() as each:
        each.bind(("127.0.0.1", 0))
        return int(each.getsockname()[1])


class Bare:
    """A model's file in this process, on the GPU."""

    def __init__(self, model: Model, file: Path) -> None:
        self._module = torch.jit.load(str(file), map_location="cuda").eval()
        self._rows = np.repeat(model.row[None], BATCH, 0)
        for _ in range(20):  # the first calls optimise
            self.answer()

    @torch.inference_mode()
    def answer(self) -> np.ndarray:
        """One batch."""
        found: np.ndarray = self._module(torch.from_numpy(self._rows).to("cuda")).cpu().numpy()
        return found

    def per_s(self, window_s: float) -> float:
        """Rows a second."""
        begun, batches = time.perf_counter(), 0
        while time.perf_counter() - begun < window_s:
            self.answer()
            batches += 1
        return batches * BATCH / (time.perf_counter() - begun)


@contextlib.contextmanager
def serving(repository: Path, cores: Sequence[int], folder: Path) -> Iterator[str]:
    """`forebay serve`; yields its URL."""
    ports = [free_port() for _ in range(3)]
    words = [
        word for name, port in zip(("http", "grpc", "metrics"), ports, strict=True)
        for word in (f"--{name}-port", str(port))
    ]  # fmt: skip
    command = [sys.executable, "-m", "forebay.cli.main", "serve", "--repository", str(repository), *words]
    log, url = folder / "serve.log", f"http://127.0.0.1:{ports[0]}"
    with started(command, ",".join(map(str, cores)), log) as process:
        deadline = time.monotonic() + START_TIMEOUT_S
        while True:
            with contextlib.suppress(httpx.HTTPError):
                if httpx.get(f"{url}/v2/health/ready").status_code == 200:
                    break
            if time.monotonic() > deadline or process.poll() is not None:
                raise SystemExit(f"the server is not ready; its log:\n{log.read_text(errors='replace')[-3000:]}")
            time.sleep(0.5)
        yield url


def asked(name: str, model: Model, *, shared: bool) -> bytes:
    """A request as bytes of HTTP/1.1."""
    binary = model.row.tobytes()
    size = len(binary)
    where = (
        {"shared_memory_region": REGION, "shared_memory_byte_size": size} if shared else {"binary_data_size": size}
    )
    tensor = {"name": "INPUT__0", "datatype": model.datatype, "shape": model.shape, "parameters": where}
    head = json.dumps({"inputs": [tensor], "parameters": {"binary_data_output": True}}).encode()
    body = head if shared else head + binary
    return (
        b"POST /v2/models/%s/infer HTTP/1.1\r\nhost: 127.0.0.1\r\ninference-header-content-length: %d\r\n"
        b"content-length: %d\r\n\r\n%s" % (name.encode(), len(head), len(body), body)
    )


def load(tool: Load, url: str, request: bytes, window_s: float, rate_per_s: float = 0) -> Run:
    """One load; `rate_per_s` 0 is a closed loop."""
    file = tool.program.with_name("request")
    file.write_bytes(request)
    port = url.rpartition(":")[2]
    words = [port, UNDER_WAY, "unary", 0, 0, 0, rate_per_s, WARMUP_S, window_s]
    command = [str(tool.program), *map(str, words)]
    with started(command, ",".join(map(str, tool.cores)), environ={"BENCH_REQUEST": str(file)}) as generator:
        assert generator.stdout is not None
        lines = generator.stdout.read().splitlines()
    if len(lines) != 2:
        raise SystemExit("the load generator ended; it says why above")
    seen = json.loads(lines[1])
    if seen["errors"] or not seen["requests"]:
        raise SystemExit(f"{seen['errors']} requests failed, {seen['requests']} did not")
    found = {"per_s": seen["requests"] / seen["seconds"], "p50_ms": seen["p50_us"] / 1000}
    return {**found, "p99_ms": seen["p99_us"] / 1000}


def check(url: str, name: str, request: bytes, bare: Bare) -> None:
    """The server's answer is the bare runtime's."""
    head, _, body = request.partition(b"\r\n\r\n")
    size = head.rpartition(b"inference-header-content-length: ")[2].partition(b"\r\n")[0].decode()
    header = {"inference-header-content-length": size}
    answer = httpx.post(f"{url}/v2/models/{name}/infer", content=body, headers=header, timeout=60)
    if answer.status_code != 200:
        raise SystemExit(f"{name}: {answer.text}")
    found = np.frombuffer(answer.content[int(answer.headers["inference-header-content-length"]) :], np.float32)
    if not np.allclose(found, bare.answer()[0], rtol=0.05, atol=0.02):
        raise SystemExit(f"{name}: the server's answer is another one than PyTorch's")


@contextlib.contextmanager
def shared(url: str, model: Model) -> Iterator[None]:
    """A row of the model in system shared memory that the server knows."""
    memory = SharedMemory(create=True, size=model.row.nbytes)
    try:
        memory.buf[:] = model.row.tobytes()
        told = {"key": f"/{memory.name}", "offset": 0, "byte_size": model.row.nbytes}
        httpx.post(f"{url}/v2/systemsharedmemory/region/{REGION}/register", json=told).raise_for_status()
        yield
        httpx.post(f"{url}/v2/systemsharedmemory/region/{REGION}/unregister").raise_for_status()
    finally:
        memory.close()
        memory.unlink()


def measure(model: Model, folder: Path, tool: Load, rounds: int, window_s: float) -> Iterator[tuple[str, Run]]:
    """Every way of asking a model; yields (scenario, figures)."""
    repository = folder / model.name
    files = {f"{model.name}_{n}": model.write(repository, f"{model.name}_{n}", n) for n in INSTANCES}
    cores = sorted(os.sched_getaffinity(0))
    bare = Bare(model, next(iter(files.values())))
    ways = (False, True) if model.row.nbytes > 2**16 else (False,)
    with serving(repository, cores, folder) as url, shared(url, model):
        for name, way in [(name, way) for name in files for way in ways]:
            request = asked(name, model, shared=way)
            check(url, name, request, bare)
            for _ in range(rounds):
                alone = bare.per_s(window_s)
                closed = load(tool, url, request, window_s)
                waited = load(tool, url, request, window_s, closed["per_s"] * SHARE)
                run = {"bare_per_s": alone, "per_s": closed["per_s"], "ratio": closed["per_s"] / alone}
                yield (
                    f"{name}_{'shared' if way else 'http'}",
                    {**run, "open_per_s": waited["per_s"], "p50_ms": waited["p50_ms"], "p99_ms": waited["p99_ms"]},
                )


def main() -> None:
    """Run the rounds, write results.json."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--window", type=float, default=3.0, help="counted seconds of each load")
    parser.add_argument("--only", default=",".join(model.name for model in MODELS))
    parser.add_argument("--output", type=Path, default=HERE / "results.json")
    options = parser.parse_args()
    if not torch.cuda.is_available():
        raise SystemExit("PyTorch finds no GPU here; this benchmark needs one of NVIDIA's, and PyTorch with CUDA")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # who is told to stop stops what it has started
    seen: dict[str, list[Run]] = {}
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        cores = sorted(os.sched_getaffinity(0))
        os.sched_setaffinity(0, cores[:-LOAD_CORES])
        tool = Load(folder / "load", cores[-LOAD_CORES:])
        source = HERE.parent / "gateway/load.c"
        subprocess.run(["gcc", "-O2", "-o", str(tool.program), str(source), "-lm"], check=True)
        for model in MODELS:
            if model.name in options.only.split(","):
                for scenario, run in measure(model, folder, tool, options.rounds, options.window):
                    seen.setdefault(scenario, []).append(run)
                    shown = "  ".join(f"{key} {figure:,.2f}" for key, figure in run.items())
                    print(f"{scenario:18} {shown}", flush=True)
    figures = {
        scenario: {key: round(statistics.median(run[key] for run in runs), 3) for key in runs[0]}
        | {"ratio_min": round(min(r["ratio"] for r in runs), 3), "ratio_max": round(max(r["ratio"] for r in runs), 3)}
        for scenario, runs in seen.items()
    }
    found = {
        "machine": {**machine(), "gpu": torch.cuda.get_device_name(0)},
        "versions": {"torch": torch.__version__},
        "rounds": options.rounds,
        "figures": figures,
    }
    options.output.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
