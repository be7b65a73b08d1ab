"""What Forebay's model server costs, beside Triton, LitServe, BentoML, MLServer and the bare runtime in one run.

    python bench/server/run.py [--rounds 2] [--window 4] [--only forebay,triton] [--model embedding] [--cores 0,1]
        [--quick]

The server under test (its whole process tree) is pinned to core 0 and runs one instance of each ONNX model on one
thread; the load generator, in C, has core 1, unless `--cores` names another two. `closed`: so many connections (of
gRPC: calls under way on a few connections) that the next batch is always there; that is the server's throughput.
`open`: requests at 70 % of that server's own throughput, evenly spaced and on as many connections, latency counted
from the instant each was due; so the faster server has the higher load. (On more connections that throughput is
none it has: their state must fit into a core's cache. Who is late makes its callers wait, and that counts.) An open
loop counts some thousands of requests, longer than the window where a model takes milliseconds: of a thousand, the
99th percentile is the tenth latest, and one pause of the machine makes ten late. `as_PEER`, of ours only: as many
requests per second as that peer had. `cpu_us` is time by the kernel's own account for one request: other load on
the machine changes that less than throughput and latency, which want a quiet one; `server_us` is what the first
process of a server has of it. `bare` runs full batches in a loop, of as many rows as are fastest (powers of two up
to the model's most, tried before each round), `bare_tuned` with the settings of Forebay's model processes,
`bare_whole` of the most rows. `bare_http` is the runtime behind sockets in C, without anything that makes a server:
about what is left for one that costs nothing over HTTP.

The speed of a shared machine changes within seconds, by more than servers differ. So ours meets each peer in duels:
both are up, and a goal is held against the median of the ratios of all duels. In a closed loop both are loaded at
once and the core is taken from one and given to the other five times a second; a server's throughput is that of the
time in which it had the core, from an answer to an answer: one that batches gives many at once. Before it is
measured first, it has some seconds of load. Other loads take place one after the other. Who is not loaded is
stopped meanwhile: idle servers look about them, and one of them takes a tenth of the core for that. Every round has
three duels of each pair, with fresh servers. The figures in the tables are medians over all runs of a server; they
and the goals go to results.json after every round. A server that cannot be installed, started or asked is said to
be missing, and the others go on. `--quick` shows that every server answers, and writes nothing.
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
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Self

from goals import BARE, BARE_HTTP, BARE_TUNED, BARE_WHOLE, BESIDE, Duels, Loads, judged, load_beside
from models import MODELS, Model, write
from servers import PORTS, REPO, SERVERS, Ports, Server, install, version

from forebay.modelserver.process import placement

sys.path.append(str(REPO / "bench/gateway"))
from processes import WEIGHT, Cores, allow_files, cores, cpu_ns, machine, memory_kb, started, tree

HERE: Final = Path(__file__).parent
CORES: Final = Cores(0, 1)
"""Of the server, and of the load generator."""
BATCHES_UNDER_WAY: Final = 3
"""Closed loop: requests for so many batches."""
GRPC_CONNECTIONS: Final = 4
SHARE: Final = 0.7
"""Open loop: of the throughput that the closed one has found."""
P99_REQUESTS: Final = 2500
"""Open loop: counted at least, for a 99th percentile that one late batch does not decide,"""
OPEN_MOST_S: Final = 12.0
"""as long as that does not take longer than so."""
WARMUP_S: Final = 1.0
LEARN_S: Final = 4.0
"""Closed loop, when a server has just started: it may find out meanwhile how it is fastest, as Forebay does."""
DUELS: Final = 3
"""Of each pair in a round."""
QUICK_WINDOW_S: Final = 1.0
TRIAL_S: Final = 0.1
"""The runtime alone, after it was asked for the fastest number of rows."""
START_TIMEOUT_S: Final = 120.0
TURN_S: Final = 0.2
"""How long one of a pair has the core before the other. Triton gives up a model that is silent for a second."""
CHILDREN_FIRST_S: Final = 0.5
"""Triton's models write every 0.3 s that they live, and it reads that as soon as it goes on."""

Run = dict[str, float]
"""Figures of one load in one round."""
Clock = Callable[[], float]


class Failed(Exception):  # noqa: N818 - states the condition
    """A server that never answered, or a load that came to nothing."""


@dataclass(frozen=True)
class Up:
    """A server that answers."""

    name: str
    server: Server
    model: Model
    port: int
    pid: int


@dataclass(frozen=True)
class Rig:
    """The programs, models and settings of a run."""

    folder: Path
    window_s: float
    duels: int
    cores: Cores = CORES
    open_most_s: float = OPEN_MOST_S

    @property
    def repository(self) -> Path:
        """One folder for each model, which holds a repository of that model alone."""
        return self.folder / "models"

    @contextlib.contextmanager
    def serving(self, name: str, model: Model, ports: Ports, rows: int = 0) -> Iterator[Up]:
        """A fresh server of one model. `rows` that are fastest at once are for `bare_http` to know."""
        server = SERVERS[name]
        place = Path(tempfile.mkdtemp(dir=self.folder))
        start = server.start(model, self.repository / model.name, place / "server", ports)
        log = place / "log"
        environ = {**start.environ, "BENCH_ROWS": str(rows)}
        with started(start.command, self.cores.measured, log, environ) as process:
            deadline = time.monotonic() + START_TIMEOUT_S
            while not _answers(server.probe(model), ports.http):
                if time.monotonic() > deadline or process.poll() is not None:
                    raise Failed(f"it never answered; its log:\n{log.read_text(errors='replace')[-3000:]}")
                time.sleep(0.2)
            _weigh(process.pid)
            up = Up(name, server, model, server.port(ports), process.pid)
            self.measure(up, 0, min(LEARN_S, self.open_most_s))
            yield up

    def measure(self, up: Up, rate_per_s: float, window_s: float = 0.0, clock: Clock = time.monotonic) -> Run:
        """One load; `rate_per_s` 0 is a closed loop, whose throughput is by that clock."""
        request = self.folder / f"request-{up.name}"
        request.write_bytes(up.server.ask(up.model))
        under_way = BATCHES_UNDER_WAY * up.model.max_batch
        if up.server.grpc:
            words = ["load_grpc", up.port, GRPC_CONNECTIONS, under_way // GRPC_CONNECTIONS]
        else:
            words = ["load", up.port, under_way, "unary", 0, 0, 0]
        window_s = window_s or self.window_s
        if rate_per_s:
            window_s = max(window_s, min(self.open_most_s, P99_REQUESTS / rate_per_s))
        command = [f"{self.folder}/{words[0]}", *map(str, [*words[1:], rate_per_s, WARMUP_S, window_s])]
        with started(command, self.cores.load, environ={"BENCH_REQUEST": str(request)}) as generator:
            assert generator.stdout is not None
            if generator.stdout.readline() != b"window\n":
                raise Failed("the load generator ended")
            begun, before_ns, server_ns = clock(), cpu_ns(up.pid), cpu_ns(up.pid, alone=True)
            line = generator.stdout.readline()
            if not line:
                raise Failed("the load generator ended within its window; it says why above")
            seen = json.loads(line)
            seconds, spent_ns = clock() - begun, cpu_ns(up.pid) - before_ns
            server_ns = cpu_ns(up.pid, alone=True) - server_ns
        if not seen["requests"]:
            raise Failed(f"no request was answered, {seen['errors']} failed")
        spent = {"cpu_us": spent_ns, "server_us": server_ns}
        costs = {name: ns / 1000 / seen["requests"] for name, ns in spent.items()} | {"errors": seen["errors"]}
        if not rate_per_s:
            return {"per_s": seen["requests"] / seconds} | costs
        latency = {f"{share}_ms": seen[f"{share}_us"] / 1000 for share in ("p50", "p99")}
        return {"per_s": seen["requests"] / seen["seconds"]} | latency | costs

    @contextlib.contextmanager
    def bare(self, model: Model, rows: int, window_s: float, *, tuned: bool) -> Iterator[subprocess.Popen[bytes]]:
        """The runtime alone, by its own settings, or by those that Forebay gives it. `of_bare` reads what it says."""
        files = ":".join(str(self.repository / model.name / name / "1/model.onnx") for name in model.folders)
        row = ",".join(map(str, model.row))
        words = [files, model.input, rows, window_s, row, 0 if tuned else 1]
        command = [sys.executable, str(HERE / "bare.py"), *map(str, words)]
        with started(command, self.cores.measured, environ=placement.DEFAULTS if tuned else {}) as process:
            yield process

    def ideal(self, model: Model) -> int:
        """The number of rows that is fastest at once, for the runtime alone. Raises `Failed`."""
        with self.bare(model, -model.max_batch, TRIAL_S, tuned=False) as process:
            return int(of_bare(process)["rows"])


def of_bare(process: subprocess.Popen[bytes], clock: Clock = time.monotonic) -> Run:
    """What the runtime alone has done within its window."""
    assert process.stdout is not None
    if process.stdout.readline() != b"window\n":
        raise Failed("the runtime ended")
    begun = clock()
    seen = json.loads(process.stdout.readline())
    return {"per_s": seen["done"] / (clock() - begun), "cpu_us": seen["cpu_us"], "rows": seen["rows"]}


class Turns:
    """Process trees that have the core in turns, by `TURN_S`, until the end of the block; the others are stopped."""

    def __init__(self, *roots: int) -> None:
        self._trees = {root: tree(root) for root in roots}
        self._had_s = dict.fromkeys(roots, 0.0)
        self._now, self._since = 0, 0.0
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._take_turns, daemon=True)

    def __enter__(self) -> Self:
        for pids in self._trees.values():
            _signal(pids, signal.SIGSTOP)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()
        for pids in self._trees.values():
            _signal(pids[::-1], signal.SIGCONT)

    def clock(self, root: int) -> Clock:
        """How long it has had the core, in seconds."""

        def had_s() -> float:
            return self._had_s[root] + (time.monotonic() - self._since if self._now == root else 0.0)

        return had_s

    def _take_turns(self) -> None:
        while not self._over.is_set():
            for root, pids in self._trees.items():
                self._now, self._since = root, time.monotonic()
                _signal(pids[::-1], signal.SIGCONT)
                self._over.wait(TURN_S)
                _signal(pids, signal.SIGSTOP)
                self._now, had_s = 0, time.monotonic() - self._since
                self._had_s[root] += had_s


def _signal(pids: list[int], what: signal.Signals) -> None:
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, what)


def _weigh(pid: int) -> None:
    """Give the sessions that a server has made for its children the weight of its own."""
    for each in tree(pid):
        with contextlib.suppress(OSError):
            Path(f"/proc/{each}/autogroup").write_text(WEIGHT)


def _answers(request: bytes, port: int) -> bool:
    """Whether the server answers that request, and with 200."""
    with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), timeout=5) as connection:
        connection.sendall(request)
        return connection.recv(64).startswith(b"HTTP/1.1 200")
    return False


Told = tuple[str, str, Run]
"""Server, load, figures."""
Duel = tuple[str, Loads, str, Loads]


def one_round(names: list[str], model: Model, rig: Rig, told: Callable[[Told], None]) -> Iterator[Duel]:
    """Who is compared with nobody, then every duel; `told` hears every load."""
    rows = rig.ideal(model)
    for name, most, tuned in ((BARE_TUNED, rows, True), (BARE_WHOLE, model.max_batch, False)):
        with _missing(name, model), rig.bare(model, most, rig.window_s, tuned=tuned) as process:
            told((name, "closed", of_bare(process)))
    for name in names:
        if name not in BESIDE and name not in BESIDE.values() and (model.steps or not SERVERS[name].ensembles):
            with _missing(name, model), rig.serving(name, model, PORTS[0], rows) as alone:
                told((name, "closed", closed := _closed(rig, alone)))
                told((name, "open", rig.measure(alone, _share(closed))))
    for ours in dict.fromkeys((BARE_HTTP, *BESIDE.values())):
        if ours in names:
            with _missing(ours, model), rig.serving(ours, model, PORTS[0], rows) as up:
                yield from _beside_bare(up, rows, rig, told)
    for beside, ours in BESIDE.items():
        if ours in names and beside in names:
            yield from _pair(ours, beside, model, rig, told)


def _beside_bare(up: Up, rows: int, rig: Rig, told: Callable[[Told], None]) -> Iterator[Duel]:
    window_s = 2 * rig.window_s
    for _ in range(rig.duels):
        with (
            rig.bare(up.model, rows, window_s, tuned=False) as process,
            Turns(up.pid, process.pid) as turns,
            ThreadPoolExecutor() as pool,
        ):
            beside = pool.submit(of_bare, process, turns.clock(process.pid))
            closed = _closed(rig, up, window_s, turns.clock(up.pid))
            bare = beside.result()
        told((BARE, "closed", bare))
        told((up.name, "closed", closed))
        yield up.name, {"closed": closed}, BARE, {"closed": bare}


def _pair(ours: str, beside: str, model: Model, rig: Rig, told: Callable[[Told], None]) -> Iterator[Duel]:
    """All duels of a pair. Now and then a server does not outlive being stopped: then on with fresh ones, once."""
    left = rig.duels
    for _ in range(2):
        with (
            _missing(f"{ours} beside {beside}", model),
            rig.serving(ours, model, PORTS[0]) as own,
            rig.serving(beside, model, PORTS[1]) as other,
        ):
            for duel in _duels(left, own, other, rig, told):
                left -= 1
                yield duel
        if not left:
            return


def _duels(count: int, ours: Up, beside: Up, rig: Rig, told: Callable[[Told], None]) -> Iterator[Duel]:
    for _ in range(count):
        seen: dict[str, dict[str, Run]] = {ours.name: {}, beside.name: {}}

        def note(up: Up, load: str, run: Run, seen: dict[str, dict[str, Run]] = seen) -> None:
            seen[up.name][load] = run
            told((up.name, load, run))

        with Turns(ours.pid, beside.pid) as each, ThreadPoolExecutor() as pool:
            loads = [pool.submit(_closed, rig, up, 2 * rig.window_s, each.clock(up.pid)) for up in (ours, beside)]
            closed = [load.result() for load in loads]
        for up, run in zip((ours, beside), closed, strict=True):
            note(up, "closed", run)
        for up, other in ((ours, beside), (beside, ours)):
            with _stopped(other):
                note(up, "open", rig.measure(up, _share(seen[up.name]["closed"])))
        with _stopped(beside):
            note(ours, load_beside(beside.name), rig.measure(ours, _share(seen[beside.name]["closed"])))
        yield ours.name, seen[ours.name], beside.name, seen[beside.name]


@contextlib.contextmanager
def _stopped(up: Up) -> Iterator[None]:
    """A server takes no part for a while. Children go on before it: Triton ends if it hears nothing of its own."""
    pids = tree(up.pid)
    _signal(pids, signal.SIGSTOP)
    try:
        yield
    finally:
        _signal(pids[:0:-1], signal.SIGCONT)
        time.sleep(CHILDREN_FIRST_S)
        _signal(pids[:1], signal.SIGCONT)


def _closed(rig: Rig, up: Up, window_s: float = 0.0, clock: Clock = time.monotonic) -> Run:
    run = rig.measure(up, 0, window_s, clock)
    return run | {"pss_mb": memory_kb(up.pid, "Pss") / 1024, "processes": len(tree(up.pid))}


def _share(closed: Run) -> int:
    return round(SHARE * closed["per_s"])


@contextlib.contextmanager
def _missing(name: str, model: Model) -> Iterator[None]:
    """What fails within is said, and the run goes on."""
    try:
        yield
    except (Failed, OSError, ValueError) as failed:
        print(f"MISSING: {name} with {model.name}: {failed}", flush=True)


Seen = dict[str, dict[str, dict[str, list[Run]]]]


def rounds(names: list[str], models: list[Model], count: int, rig: Rig, done: Callable[..., None]) -> None:
    """Measure, and say so on the way; `done` hears number, figures and duels after each round."""
    seen: Seen = {}
    duels: dict[str, list[Duel]] = {}
    for number in range(1, count + 1):
        for model in models:

            def told(what: Told, number: int = number, model: Model = model) -> None:
                name, load, run = what
                seen.setdefault(model.name, {}).setdefault(name, {}).setdefault(load, []).append(run)
                shown = "  ".join(f"{key} {figure:,.2f}" for key, figure in run.items())
                print(f"round {number} {model.name:12}{name:20}{load:16}{shown}", flush=True)

            duels.setdefault(model.name, []).extend(one_round(names, model, rig, told))
        done(number, seen, duels)


def result(names: list[str], count: int, seen: Seen, duels: Duels) -> dict[str, object]:
    """What results.json holds."""
    figures = {
        model: {
            name: {
                load: {key: round(statistics.median(run[key] for run in runs), 3) for key in runs[0]}
                for load, runs in servers[name].items()
            }
            for name in (BARE, BARE_TUNED, BARE_WHOLE, *SERVERS)
            if name in servers
        }
        for model, servers in seen.items()
    }
    return {
        "machine": machine(),
        "versions": {name: version(name) for name in names},
        "rounds": count,
        "figures": figures,
        "goals": judged(figures, duels),
    }


def main() -> None:
    """Parse arguments, run the rounds, write the results."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--window", type=float, default=4.0, help="counted seconds of each load")
    parser.add_argument("--only", default=",".join(SERVERS))
    parser.add_argument("--model", default=",".join(model.name for model in MODELS))
    parser.add_argument("--output", type=Path, default=HERE / "results.json")
    parser.add_argument("--cores", type=cores, default=CORES, metavar="A,B", help="of the server, and of its load")
    parser.add_argument("--quick", action="store_true", help="one round of short windows; writes nothing")
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # who is told to stop stops what it has started
    names = [name for name in options.only.split(",") if name]
    if unknown := [name for name in names if name not in SERVERS]:
        parser.error(f"--only: there is no {unknown[0]}; there are {', '.join(SERVERS)}")
    models = [model for model in MODELS if model.name in options.model.split(",")]
    names = install(names)
    allow_files()
    count, window_s, duels = (1, QUICK_WINDOW_S, 1) if options.quick else (options.rounds, options.window, DUELS)

    def done(number: int, seen: Seen, duels: Duels) -> None:
        found = result(names, number, seen, duels)
        if not options.quick:
            options.output.write_text(json.dumps(found, indent=1) + "\n")
        if number == count:
            print(json.dumps(found["goals"], indent=1))

    with tempfile.TemporaryDirectory() as folder:
        rig = Rig(Path(folder), window_s, duels, options.cores, window_s if options.quick else OPEN_MOST_S)
        for source in (REPO / "bench/gateway/load.c", HERE / "load_grpc.c"):
            subprocess.run(["gcc", "-O2", "-o", f"{folder}/{source.stem}", str(source), "-lm"], check=True)
        write(rig.repository)
        rounds(names, models, count, rig, done)


if __name__ == "__main__":
    main()
