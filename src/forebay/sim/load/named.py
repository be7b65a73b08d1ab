"""Workloads by name: small copies of public traces in this package (data/README.md), and generated ones."""

from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Final

from forebay.sim.load.columns import columns
from forebay.sim.load.made import at_random, burst, hot_prefix, multi_turn, tenants
from forebay.sim.load.traces.lines import BadTrace
from forebay.sim.load.traces.read import read
from forebay.sim.load.values import Workload
from forebay.sim.load.week import week

DATA: Final = Path(__file__).with_name("data")
TRACES: Final = {
    "mooncake": "mooncake/conversation_trace.jsonl.gz",
    "azure": "azure/AzureLLMInferenceTrace_code.csv.gz",
    "servegen": "servegen/m-large_1h.csv.gz",
}
"""Name → its file in the package."""


def _azure_week(rng: Random) -> Workload:
    return week(DATA / "azure", columns(workload("azure", rng).arrivals).output_tokens, rng)


MADE: Final[dict[str, Callable[[Random], Workload]]] = {
    "azure-week": _azure_week,
    "hot-prefix": hot_prefix,
    "tenants": tenants,
    "multi-turn": multi_turn,
    "poisson": at_random,
    "burst": burst,
}
"""Name → its generator."""
NAMES: Final = (*TRACES, *MADE)


def workload(what: str, rng: Random, model: str = "") -> Workload:
    """A workload by its name (`NAMES`), else the trace in the file or folder `what`; `model` as in `read`.

    Raises `BadTrace`.
    """
    if what in NAMES and model:
        raise BadTrace(f"{what}: a model ({model!r}) can be chosen from decision records only")
    if what in MADE:
        return MADE[what](rng)
    if what in TRACES:
        return read(DATA / TRACES[what], rng, name=what)
    path = Path(what)
    if not path.exists():
        raise BadTrace(f"{what}: no such file, and none of the names: {', '.join(NAMES)}")
    return read(path, rng, model)
