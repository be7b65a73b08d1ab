"""Transformations of workloads: speed-up, excerpts, jitter. The name records what was done."""

from array import array
from bisect import bisect_left
from random import Random

from forebay.sim.load.columns import columns
from forebay.sim.load.values import Workload


def faster(workload: Workload, speed: float) -> Workload:
    """The same requests with all times divided by `speed`, which must be above 0."""
    if not speed > 0:
        raise ValueError(f"speed {speed}: must be above 0")
    requests = columns(workload.arrivals)
    return workload._replace(
        name=f"{workload.name} (x{speed:g})", arrivals=requests.at(array("d", (at / speed for at in requests.at_s)))
    )


def between(workload: Workload, from_s: float, to_s: float) -> Workload:
    """The requests from `from_s` until before `to_s`, with times relative to `from_s`."""
    requests = columns(workload.arrivals)
    part = requests[bisect_left(requests.at_s, from_s) : bisect_left(requests.at_s, to_s)]
    return workload._replace(
        name=f"{workload.name} ({from_s:g} to {to_s:g} s)",
        arrivals=part.at(array("d", (at - from_s for at in part.at_s))),
    )


def first(workload: Workload, count: int) -> Workload:
    """The first requests, at most `count`."""
    return workload._replace(name=f"{workload.name} (first {count})", arrivals=columns(workload.arrivals)[:count])


def jittered(workload: Workload, quantum_s: float, rng: Random) -> Workload:
    """Each request moved to a random time within `quantum_s` after its own; the order is kept.

    A coarse clock creates artificial bursts: of 40 requests at one instant the last ones wait long.
    """
    requests = columns(workload.arrivals)
    at_s = array("d", sorted(at + rng.random() * quantum_s for at in requests.at_s))
    return workload._replace(name=f"{workload.name} ({quantum_s:g} s ticks jittered)", arrivals=requests.at(at_s))
