"""What Forebay's gateway costs, beside other gateways, nginx and a relay of nothing but sockets in one run.

    python bench/gateway/run.py [--rounds 3] [--window 4] [--only forebay,nginx] [--cores 0,1] [--quick]

The proxy under test (its whole process tree) is pinned to core 0; a model server and a load generator in C share core
1, unless `--cores` names another two. CPU is time by the kernel's own account (`/proc/PID/task/*/schedstat`) over a
counted window, divided by what was completed in it: other load on the machine delays a proxy but hardly changes that
quotient. Events come at a fixed rate: where 64,000/s nearly fill a core, no cost above 15.6 us can show, so a second
load offers 102,400/s, which all may fail to deliver. `coalesced` (the share of events that arrived in the same read
as an earlier one, which makes them cheaper) and `delivered` (the share of the offered events) belong to every figure
of events; of `direct`, they tell how quiet the machine was. Where less is delivered than offered, events queue up in
sockets and one read finds several: so what a proxy itself glues together shows in two more loads, of half and of a
quarter as many events from as many streams (on a slow machine half of them nearly fill a core, too).

`ttft` opens 100 streams a second whatever happens, and takes off what the model server takes when asked directly in
the same round. It opens one every 10 ms, which is also how often each stream has an event: so the first one of a
stream comes in a burst with one of each of the twenty others, and waits for about half of them. `ttft_random` opens
as many at random instants, as independent clients do. `ttft_awake` is the same while idle cores poll and do not halt,
as tuned's profiles for latency have it: what a virtual core takes to wake up is more than what most proxies add, and
another time each time. `memory` is the PSS of a fresh process tree with a thousand streams of one event a second,
less what it had before them.

Every round puts all proxies through one load after the other, twice (requests and first events four times), in an
order that is rotated from round to round: what is compared is measured within half a minute, because what a machine
does to caches and clocks changes with the minutes. (LiteLLM has a load of its own, and is alone.) A goal is held
against the median of the ratios of neighbours; figures are medians, too. Both go to results.json, and a picture to
docs/. Three rounds take about 55 minutes.
`BENCH_BEFORE=FOLDER` adds another build of Forebay, an older commit's `build/compiled`, to be compared with this one:

    BENCH_BEFORE=FOLDER python bench/gateway/run.py --only forebay,forebay_before --output since.json

`--quick` shows in six minutes that every proxy answers everything; its figures are worth nothing and are not kept.
"""

import argparse
import contextlib
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
import tracemalloc
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final, NamedTuple

from goals import judged
from processes import Cores, allow_files, await_answer, cores, cpu_ns, machine, memory_kb, started
from proxies import KEY, MOCK_PORT, PROXIES, PROXY_PORT, REPLICAS, install, version

from forebay.wire.transcript import Transcript

HERE: Final = Path(__file__).parent
RESULTS: Final = HERE / "results.json"
CHART: Final = HERE.parents[1] / "docs/gateway-bench.svg"
CORES: Final = Cores(0, 1)
"""Of the proxy, and of model server and load generator."""
SETTLE_S: Final = 1.0
"""After the first answer, before an idle process is measured."""
TURNS: Final = 2
"""How often a round goes through the loads that all proxies have."""
QUICK_WINDOW_S: Final = 0.5
LATENCY: Final = Path("/dev/cpu_dma_latency")
"""Who holds this open has told the kernel how many microseconds an idle core may take to wake up."""
DIRECT: Final = "direct"
JOURNAL_EVENTS: Final = 4096

Run = dict[str, float]
"""Figures of one scenario in one round."""


@dataclass(frozen=True)
class Scenario:
    """One load. Unary: requests are counted; stream: events. `rate_per_s` 0 is a closed loop."""

    name: str
    connections: int
    kind: str
    body_bytes: int
    events: int = 0
    interval_us: int = 0
    rate_per_s: int = 0
    seed: int | None = None
    """For random instants of an open loop; None: they are evenly spaced."""
    awake: bool = False
    """Idle cores poll meanwhile. Not measured where one may not ask the kernel for that."""
    warmup_s: float = 1.0
    window_s: float = 0.0
    """0: what was asked for."""


REQUESTS: Final = (
    Scenario("request_1k", 64, "unary", 1024),
    Scenario("request_32k", 64, "unary", 32_768),
)
EVENTS: Final = (
    Scenario("event_64x1ms", 64, "stream", 1024, 500, 1000),
    Scenario("event_512x5ms", 512, "stream", 1024, 100, 5000),
    Scenario("event_512x10ms", 512, "stream", 1024, 50, 10_000),
    Scenario("event_512x20ms", 512, "stream", 1024, 50, 20_000),
)
TTFT: Final = Scenario("ttft", 1000, "stream", 1024, 20, 10_000, rate_per_s=100)
RANDOM: Final = replace(TTFT, name="ttft_random", seed=1)
TTFTS: Final = (TTFT, RANDOM, replace(RANDOM, name="ttft_awake", awake=True))
TURN: Final = (*REQUESTS, *EVENTS, *TTFTS, *REQUESTS, *TTFTS)
"""Requests and first events twice: on a shared machine, what a request costs differs between neighbours by 15 %, how
late a first event is by 20 %, what an event costs by 5 %."""
MEMORY: Final = Scenario("memory", 1000, "stream", 1024, 60, 1_000_000, warmup_s=9.0, window_s=2.0)
GENTLE_ONE: Final = "litellm"
GENTLE: Final = (
    replace(MEMORY, connections=200),
    Scenario("request_1k", 16, "unary", 1024),
    Scenario("request_32k", 16, "unary", 32_768),
    Scenario("event_64x1ms", 16, "stream", 1024, 100, 20_000),
)
"""LiteLLM cannot sustain the others; what it costs is measured where it can."""


class Rig(NamedTuple):
    """The programs and settings of a run."""

    folder: Path
    mock: str
    load: str
    window_s: float
    cores: Cores = CORES

    @contextlib.contextmanager
    def mocked(self) -> Iterator[None]:
        """A fresh model server."""
        with started([self.mock, str(MOCK_PORT), str(REPLICAS)], self.cores.load, self.folder / "mock.log"):
            time.sleep(0.2)
            yield

    @contextlib.contextmanager
    def serving(self, name: str, port: int = PROXY_PORT) -> Iterator[int]:
        """A fresh proxy in front of the model server; yields its process id."""
        place = Path(tempfile.mkdtemp(dir=self.folder))
        log = place / "proxy.log"
        with started(PROXIES[name](place, port), self.cores.measured, log) as proxy:
            await_answer(port, KEY, proxy, log)
            yield proxy.pid

    def measure(self, scenario: Scenario, port: int, pid: int | None) -> Run:
        """Run one scenario against a port; `pid` is the process that pays for it."""
        window_s = scenario.window_s or self.window_s
        words = (
            port, scenario.connections, scenario.kind, scenario.body_bytes, scenario.events, scenario.interval_us,
            scenario.rate_per_s, scenario.warmup_s, window_s, *(() if scenario.seed is None else (scenario.seed,)),
        )  # fmt: skip
        before_kb = memory_kb(pid, "Pss") if pid is not None else 0
        with (
            awake() if scenario.awake else contextlib.nullcontext(),
            started([self.load, *map(str, words)], self.cores.load, environ={"BENCH_KEY": KEY}) as generator,
        ):
            assert generator.stdout is not None
            if generator.stdout.readline() != b"window\n":
                raise SystemExit(f"the load generator failed in {scenario.name}")
            before_ns = cpu_ns(pid) if pid is not None else 0
            if scenario.name == "memory" and pid is not None:
                grown_kb = memory_kb(pid, "Pss") - before_kb
                seen = json.loads(generator.stdout.readline())
                return _memory(scenario, before_kb, grown_kb, seen)
            seen = json.loads(generator.stdout.readline())
            spent_ns = cpu_ns(pid) - before_ns if pid is not None else 0
        return _costs(scenario, spent_ns, seen)


@contextlib.contextmanager
def awake() -> Iterator[None]:
    """Idle cores poll."""
    with LATENCY.open("wb", buffering=0) as told:
        told.write((0).to_bytes(4, sys.byteorder))
        yield


def _costs(scenario: Scenario, spent_ns: int, seen: Run) -> Run:
    units = seen["events"] if scenario.kind == "stream" else seen["requests"]
    run = {
        "cpu_us": spent_ns / 1000 / max(1, units),
        "per_s": units / seen["seconds"],
        "errors": seen["errors"],
        "p50_us": seen["p50_us"],
        "p99_us": seen["p99_us"],
    }
    if scenario.kind == "stream":
        run["coalesced"] = 1 - seen["event_reads"] / max(1, seen["events"])
        if not scenario.rate_per_s:
            run["delivered"] = run["per_s"] * scenario.interval_us / 1e6 / scenario.connections
    return run


def _memory(scenario: Scenario, before_kb: int, grown_kb: int, seen: Run) -> Run:
    return {
        "stream_kb": grown_kb / scenario.connections,
        "idle_mb": before_kb / 1024,
        "streams": scenario.connections,
        "delivered": seen["events"] / seen["seconds"] * scenario.interval_us / 1e6 / scenario.connections,
        "errors": seen["errors"],
    }


def one_round(names: list[str], rig: Rig) -> Iterator[tuple[str, str, Run]]:
    """Memory of one proxy after the other, then all of them through each load; yields (proxy, scenario, figures)."""
    together = [name for name in names if name != GENTLE_ONE]
    for name in together:
        with rig.mocked(), rig.serving(name) as pid:
            time.sleep(SETTLE_S)
            yield name, MEMORY.name, rig.measure(MEMORY, PROXY_PORT, pid)
    with contextlib.ExitStack() as running:
        running.enter_context(rig.mocked())
        ports = {name: PROXY_PORT + 2 * at for at, name in enumerate(together)}
        pids = {name: running.enter_context(rig.serving(name, ports[name])) for name in together}
        for scenario in TURN * TURNS:
            if scenario.awake and not os.access(LATENCY, os.W_OK):
                continue
            direct = rig.measure(scenario, MOCK_PORT, None)
            yield DIRECT, scenario.name, direct
            for name in together:
                run = rig.measure(scenario, ports[name], pids[name])
                if scenario in TTFTS:
                    run |= {f"added_{p}_us": run[f"{p}_us"] - direct[f"{p}_us"] for p in ("p50", "p99")}
                yield name, scenario.name, run
    if GENTLE_ONE in names:
        with rig.mocked(), rig.serving(GENTLE_ONE) as pid:
            time.sleep(SETTLE_S)
            for scenario in GENTLE:
                yield GENTLE_ONE, scenario.name, rig.measure(scenario, PROXY_PORT, pid)


def journal() -> Run:
    """Memory of what a gateway keeps of a long stream in order to resume it, per byte of its text."""
    event = (
        b'data: {"id":"chatcmpl-mock","object":"chat.completion.chunk","created":1700000000,"model":"mock",'
        b'"choices":[{"index":0,"delta":{"content":" %016d"},"logprobs":null,"finish_reason":null}]}\n\n'
    )
    tracemalloc.start()
    before, _ = tracemalloc.get_traced_memory()
    transcript = Transcript()
    for n in range(JOURNAL_EVENTS):
        transcript.feed(event % n)
    held = tracemalloc.get_traced_memory()[0] - before
    tracemalloc.stop()
    said = transcript.state()
    assert said is not None, "a stream of plain chunks can be resumed"
    return {"per_text_byte": held / len(said.text), "text_bytes": len(said.text)}


def medians(runs: list[Run]) -> Run:
    """The median of every figure, and the spread of CPU."""
    found = {key: round(statistics.median(run[key] for run in runs), 4) for key in runs[0]}
    if "cpu_us" in found:
        costs = [run["cpu_us"] for run in runs]
        found |= {"cpu_us_min": round(min(costs), 2), "cpu_us_max": round(max(costs), 2)}
    return found


def rounds(names: list[str], count: int, rig: Rig) -> dict[str, dict[str, list[Run]]]:
    """Measure, and say so on the way."""
    seen: dict[str, dict[str, list[Run]]] = {}
    for number in range(count):
        begun = time.monotonic()
        first = number * len(names) // count
        for name, scenario, run in one_round(names[first:] + names[:first], rig):
            seen.setdefault(name, {}).setdefault(scenario, []).append(run)
            shown = "  ".join(f"{key} {figure:,.2f}" for key, figure in run.items())
            print(f"round {number + 1} {name:20}{scenario:15}{shown}", flush=True)
        print(f"round {number + 1} took {time.monotonic() - begun:.0f} s", flush=True)
    return seen


def result(names: list[str], count: int, seen: dict[str, dict[str, list[Run]]]) -> dict[str, object]:
    """What results.json holds."""
    kept = {"journal": [journal()]}
    seen = {name: found | kept if name.startswith("forebay") else found for name, found in seen.items()}
    figures = {name: {scenario: medians(runs) for scenario, runs in found.items()} for name, found in seen.items()}
    return {
        "machine": machine(),
        "versions": {name: version(name) for name in names},
        "rounds": count,
        "figures": figures,
        "goals": judged(seen),
    }


def main() -> None:
    """Parse arguments, run the rounds, write the results and their picture."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--window", type=float, default=2.0, help="counted seconds of each scenario")
    parser.add_argument("--only", default=",".join(PROXIES))
    parser.add_argument("--output", type=Path, default=RESULTS)
    parser.add_argument("--chart", type=Path, help="default: the one of docs/, if these are the results")
    parser.add_argument("--cores", type=cores, default=CORES, metavar="A,B", help="of the proxy, and of its load")
    parser.add_argument("--quick", action="store_true", help="one round of short windows; writes nothing")
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # who is told to stop stops what it has started
    names = options.only.split(",")
    install(names)
    allow_files()
    count, window_s = (1, QUICK_WINDOW_S) if options.quick else (options.rounds, options.window)
    with tempfile.TemporaryDirectory() as folder:
        for tool in ("mock", "load"):
            subprocess.run(["gcc", "-O2", "-o", f"{folder}/{tool}", str(HERE / f"{tool}.c"), "-lm"], check=True)
        rig = Rig(Path(folder), f"{folder}/mock", f"{folder}/load", window_s, options.cores)
        seen = rounds(names, count, rig)
    found = result(names, count, seen)
    print(json.dumps(found["goals"], indent=1))
    if not options.quick:
        options.output.write_text(json.dumps(found, indent=1) + "\n")
        if options.chart or options.output == RESULTS:
            from chart import draw

            draw(options.output, options.chart or CHART)


if __name__ == "__main__":
    main()
