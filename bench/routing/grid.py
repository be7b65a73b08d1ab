"""What is compared: loads, changes of the cluster, and policies; a cell is a load on a changed cluster."""

from collections.abc import Iterator
from functools import lru_cache
from random import Random
from typing import Any, Final, NamedTuple

from forebay.sim.load.change import faster
from forebay.sim.load.columns import columns
from forebay.sim.load.made import hot_prefix, tenants
from forebay.sim.load.named import workload
from forebay.sim.load.values import Workload
from forebay.sim.replay.cluster import SimCluster

SEEDS: Final = (0, 1, 2, 3, 4)
TUNING_SEEDS: Final = (100,)
"""Rivals are tuned on other draws than they are compared on."""


class Load(NamedTuple):
    """`requests` of a workload, `speed` times as fast. Of a recorded one each seed gets another part."""

    kind: str
    trace: str
    speed: float
    requests: int

    @property
    def name(self) -> str:
        """As the tables have it."""
        return f"{self.kind} x{self.speed:g}"


LOADS: Final = (
    Load("conversation", "mooncake", 1.2, 2000),
    Load("conversation", "mooncake", 1.4, 2000),
    Load("hot-prefix", "hot-prefix", 2.0, 2000),
    Load("hot-prefix", "hot-prefix", 2.5, 2000),
    Load("tenants", "tenants", 1.3, 4000),
    Load("tenants", "tenants", 1.6, 4000),
)
"""Of `tenants`, whose answers take a minute, enough that some have ended before others come; eight replicas can do
about 27 requests a second of it, so that x1.3 is just below, and x1.6 beyond."""
VARIED: Final = ("conversation x1.4", "hot-prefix x2", "tenants x1.3")
"""Loads on which the cluster is changed; step times are changed on all."""


class Change(NamedTuple):
    """Of the cluster: how long steps take, settings, and how much less load there is to go with them."""

    scale: float = 1.0
    settings: dict[str, Any] = {}  # noqa: RUF012 - never changed
    load: float = 1.0
    on_all: bool = False


AS_IS: Final = "as it is"
SHARED: Final = "4 gateways"
CHANGES: Final = {
    AS_IS: Change(on_all=True),
    "step times x0.8": Change(0.8, on_all=True),
    "step times x1.25": Change(1.25, on_all=True),
    SHARED: Change(settings={"gateways": 4}),
    "reports every 0.05 s": Change(settings={"report_every_s": 0.05}),
    "reports every 1 s": Change(settings={"report_every_s": 1.0}),
    "reports every 5 s": Change(settings={"report_every_s": 5.0}),
    "every other replica at half speed": Change(settings={"speeds": (1.0, 0.5)}, load=0.75),
}

MADE: Final = {"hot-prefix": hot_prefix, "tenants": tenants}
OURS: Final = "cpr"
TUNED: Final = {
    "smg_cache_aware": ("library", "tight", "eager", "kv", "events", "events_tight"),
    "gie": ("exact_size", "prefix", "load", "events", "events_223"),
    "dynamo": ("half", "double", "quadruple", "decay", "softmax", "predicted", "approximate"),
    "llm_d": ("2s",),
    "production_stack": ("2048", "loadaware", "loadaware_half"),
    "plain_hash": ("tenant", "2", "4"),
}
"""Rivals that are also shown with what is best for a kind of load: as shipped, or one of these."""
STRONG: Final = ("plain_least_requests", "llm_d", "lmetric")
"""These meet ours in every cell, ..."""
STRONG_TUNED: Final = ("smg_cache_aware", "gie", "dynamo", "llm_d")
"""... and so does the best setting of these."""
REST: Final = (
    "plain_random", "plain_round_robin", "plain_p2c", "plain_hash.2", *TUNED, "production_stack.loadaware", "oracle",
)  # fmt: skip
"""These, and the best settings of all, only where nothing is changed."""


class Job(NamedTuple):
    """One replay."""

    cell: str
    policy: str
    seed: int
    load: Load
    change: Change = Change()


def tuning() -> Iterator[Job]:
    """The replays that decide which setting of a rival is its best."""
    for load in LOADS:
        for seed in TUNING_SEEDS:
            for rival, variants in TUNED.items():
                for policy in (rival, *(f"{rival}.{variant}" for variant in variants)):
                    yield Job(load.name, policy, seed, load)


def grid(best: dict[str, dict[str, str]]) -> Iterator[Job]:
    """The replays that are compared; `best` is the best setting by kind of load and rival."""
    for name, change in CHANGES.items():
        for load in LOADS:
            if not change.on_all and load.name not in VARIED:
                continue
            policies = [OURS, *STRONG, *(best[load.kind][rival] for rival in STRONG_TUNED)]
            policies += [*REST, *best[load.kind].values()] if name == AS_IS else []
            policies += ["lmetric.reported"] if name == SHARED else []
            for seed in SEEDS:
                for policy in dict.fromkeys(policies):
                    yield Job(f"{load.name}, {name}", policy, seed, load, change)


def cluster(change: Change) -> SimCluster:
    """The default one, changed."""
    changed = SimCluster(**change.settings)
    return changed.model_copy(update={"speeds": tuple(speed / change.scale for speed in changed.speeds)})


@lru_cache(maxsize=2)
def requests(load: Load, seed: int, less: float = 1.0) -> Workload:
    """What arrives. Parts of a trace do not overlap as long as there are parts."""
    rng = Random(seed)
    if load.trace in MADE:
        whole = MADE[load.trace](rng, requests=load.requests)
    else:
        whole = workload(load.trace, rng)
        rows = columns(whole.arrivals)
        begin = seed % (len(rows) // load.requests) * load.requests
        whole = whole._replace(arrivals=rows[begin : begin + load.requests].from_zero())
    return faster(whole, load.speed * less)
