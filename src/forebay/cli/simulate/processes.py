"""Replays in processes of their own, several at once.

Each process does one replay and ends: whatever a replay leaves behind ends with it, and to stop is to end them.
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

TELL_EVERY_S: Final = 0.1
END_S: Final = 5.0
"""A process that was told to end gets this long."""


class Told(NamedTuple):
    """How far a replay is: requests done, and how many there are. The last one has what came of it."""

    run: Run
    done: int
    requests: int
    result: Result | None = None
    curves: Curves | None = None


class _Order(NamedTuple):
    """What a process is to do."""

    run: Run
    workload: Workload
    cluster: SimCluster


def replays(plan: Plan, workload: Callable[[int], Workload]) -> Generator[Told, None, None]:
    """Do all runs of a plan, at most `plan.jobs` at once, and tell how far they are. Raises `UserError`.

    `workload` makes that of a seed; runs of one seed follow each other. Closing the iterator ends what runs.
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
                yield Told(order.run, 0, len(order.workload.arrivals))
            for pipe in wait(list(under_way)):
                assert isinstance(pipe, Connection)
                told = _heard(pipe, *under_way[pipe])
                yield told
                if told.result is not None:
                    under_way.pop(pipe)[1].join()
                    pipe.close()
    finally:
        for _, child in under_way.values():
            child.terminate()
        for _, child in under_way.values():
            child.join(END_S)


@contextmanager
def ctrl_c_after() -> Generator[None, None, None]:
    """Take Ctrl-C when the block has ended: the fork server tells a traceback of an order that it got half of."""
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
    """Start what all processes are copies of. Ctrl-C goes to the whole terminal, but is for this process alone."""
    forkserver.set_forkserver_preload([__name__])
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        forkserver.ensure_running()
    finally:
        signal.signal(signal.SIGINT, before)


def _heard(pipe: Connection, run: Run, process: BaseProcess) -> Told:
    try:
        told = pipe.recv()
    except (EOFError, ConnectionError):
        process.join(END_S)
        raise UserError(f"The replay of {run.name} ended with code {process.exitcode}.") from None
    assert isinstance(told, Told)
    return told


def _replay(pipe: Connection) -> None:
    """What a process does. If nobody is there any more to be told, it ends."""
    try:
        order: _Order = pipe.recv()
        requests, last = len(order.workload.arrivals), perf_counter()

        def progress(done: int) -> None:
            nonlocal last
            now = perf_counter()
            if now - last >= TELL_EVERY_S:
                last = now
                pipe.send(Told(order.run, done, requests))

        pipe.send(outcome_of(order.run, order.workload, order.cluster, progress))
    except (EOFError, ConnectionError):
        return


def outcome_of(run: Run, workload: Workload, cluster: SimCluster, progress: Callable[[int], None]) -> Told:
    """Do one replay, here."""
    size = sizing(run.fleet, cluster, workload) if run.fleet else None
    outcome = replay(workload, cluster, policy=run.policy, seed=run.seed, sizing=size, progress=progress)
    found, requests = summary(outcome, Slo(cluster.slo.ttft_s, cluster.slo.tpot_s)), len(workload.arrivals)
    result = Result(run.policy, run.scale, run.seed, found, run.fleet)
    return Told(run, requests, requests, result, curves(outcome, cluster.slo))
