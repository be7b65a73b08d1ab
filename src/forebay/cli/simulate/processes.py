"""Runs replays in separate processes, several at once.

Each process does one replay and exits, which frees whatever a replay leaves behind; to stop is to terminate them.
"""

import signal
from collections import deque
from collections.abc import Callable, Generator
from contextlib import contextmanager
from multiprocessing import forkserver, get_context
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from time import perf_counter
from typing import Final, NamedTuple

from forebay.cli.settings import UserError
from forebay.cli.simulate.plan import Plan, Run
from forebay.sim.fleet.policies import sizing
from forebay.sim.load.values import Workload
from forebay.sim.replay.cluster import SimCluster
from forebay.sim.replay.outcome import Slo, summary
from forebay.sim.replay.run import replay
from forebay.sim.report.curves import Curves, curves
from forebay.sim.report.figures import Result

PROGRESS_EVERY_S: Final = 0.1
END_S: Final = 5.0
"""How long a process gets to exit after it was told to."""


class ReplayProgress(NamedTuple):
    """Progress of a replay: requests done, and their total. The last one has the result."""

    run: Run
    done: int
    requests: int
    result: Result | None = None
    curves: Curves | None = None


class _Order(NamedTuple):
    """The input of a process."""

    run: Run
    workload: Workload
    cluster: SimCluster


def replays(plan: Plan, workload: Callable[[int], Workload]) -> Generator[ReplayProgress, None, None]:
    """Do all runs of a plan, at most `plan.jobs` at once, and yield their progress. Raises `UserError`.

    `workload` returns the workload of a seed; runs of one seed follow each other. Closing the iterator stops all
    runs.
    """
    _start_server()
    context = get_context("forkserver")
    waiting, under_way = deque(plan.runs), dict[Connection, tuple[Run, BaseProcess]]()
    try:
        while waiting or under_way:
            while waiting and len(under_way) < plan.jobs:
                order = _Order(waiting[0], workload(waiting[0].seed), plan.at_scale(waiting[0].scale))
                ours, theirs = context.Pipe()
                process = context.Process(target=_replay, args=(theirs,), daemon=True)
                with ctrl_c_after():
                    process.start()
                theirs.close()
                under_way[ours] = waiting.popleft(), process
                ours.send(order)
                yield ReplayProgress(order.run, 0, len(order.workload.arrivals))
            for pipe in wait(list(under_way)):
                assert isinstance(pipe, Connection)
                update = _receive(pipe, *under_way[pipe])
                yield update
                if update.result is not None:
                    under_way.pop(pipe)[1].join()
                    pipe.close()
    finally:
        for _, child in under_way.values():
            child.terminate()
        for _, child in under_way.values():
            child.join(END_S)


@contextmanager
def ctrl_c_after() -> Generator[None, None, None]:
    """Delay Ctrl-C until the block has ended: the fork server prints a traceback for an incomplete order."""
    pressed = False

    def note(*_: object) -> None:
        nonlocal pressed
        pressed = True

    before = signal.signal(signal.SIGINT, note)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
        if pressed:
            signal.raise_signal(signal.SIGINT)


def _start_server() -> None:
    """Start the server that all processes are forked from. Ctrl-C goes to the whole terminal, but must only reach
    this process."""
    forkserver.set_forkserver_preload([__name__])
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        forkserver.ensure_running()
    finally:
        signal.signal(signal.SIGINT, before)


def _receive(pipe: Connection, run: Run, process: BaseProcess) -> ReplayProgress:
    try:
        update = pipe.recv()
    except (EOFError, ConnectionError):
        process.join(END_S)
        raise UserError(f"The replay of {run.name} ended with code {process.exitcode}.") from None
    assert isinstance(update, ReplayProgress)
    return update


def _replay(pipe: Connection) -> None:
    """Main function of a process. It exits if its parent is gone."""
    try:
        order: _Order = pipe.recv()
        requests, last = len(order.workload.arrivals), perf_counter()

        def progress(done: int) -> None:
            nonlocal last
            now = perf_counter()
            if now - last >= PROGRESS_EVERY_S:
                last = now
                pipe.send(ReplayProgress(order.run, done, requests))

        pipe.send(outcome_of(order.run, order.workload, order.cluster, progress))
    except (EOFError, ConnectionError):
        return


def outcome_of(run: Run, workload: Workload, cluster: SimCluster, progress: Callable[[int], None]) -> ReplayProgress:
    """Do one replay in this process."""
    size = sizing(run.fleet, cluster, workload) if run.fleet else None
    outcome = replay(workload, cluster, policy=run.policy, seed=run.seed, sizing=size, progress=progress)
    found, requests = summary(outcome, Slo(cluster.slo.ttft_s, cluster.slo.tpot_s)), len(workload.arrivals)
    result = Result(run.policy, run.scale, run.seed, found, run.fleet)
    return ReplayProgress(run, requests, requests, result, curves(outcome, cluster.slo))
