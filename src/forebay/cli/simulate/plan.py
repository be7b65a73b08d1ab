"""From options to a plan: what is replayed how often against what, or everything that is wrong with them."""

import difflib
import math
import os
import shlex
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from random import Random
from typing import Any, Final, NamedTuple

from forebay.cli.settings import FILE_BYTES_MAX, WRONG_USAGE, UserError, set_overrides
from forebay.core.model import Policy
from forebay.core.scaling.settings import scale_conflicts
from forebay.core.section import Conflict
from forebay.sim.engine import rows
from forebay.sim.fleet import policies as sizers
from forebay.sim.load.change import between, faster, first
from forebay.sim.load.named import NAMES, workload
from forebay.sim.load.traces.lines import BadTrace
from forebay.sim.load.values import Workload
from forebay.sim.replay.cluster import SimCluster
from forebay.sim.report.figures import label
from forebay.sim.rivals import RIVALS
from forebay.wire import clusterfile

POLICIES: Final = tuple(dict.fromkeys((*(policy.value for policy in Policy), *RIVALS)))
DEFAULT_POLICIES: Final = ("cpr", "least_requests", "round_robin")
DEFAULT_OF_FLEETS: Final = ("cpr",)
"""Where fleets are compared."""
SEEDS_MAX: Final = 1000
SCALES_MAX: Final = 20
SPEED_MAX: Final = 1000.0
SEED_MAX: Final = 2**31
DEFAULT_TRACE: Final = "mooncake"
DEFAULT_REQUESTS: Final = 3000
"""Enough to tell policies apart, and done within seconds."""
DEFAULTS_NAME: Final = "the defaults"
OPTIONS: Final = {
    "--model": "model",
    "--speed": "speed",
    "--replicas": "replicas",
    "--seed": "seed",
    "--seeds": "seeds",
    "--requests": "requests",
    "--from": "from_s",
    "--until": "until_s",
    "--scale": "scales",
}
"""Those with one value that changes figures → their fields of a `Wish`."""
MORE_OPTIONS: Final = {
    "FILE": "file",
    "--trace": "trace",
    "--policy": "policies",
    "--fleet": "fleets",
    "--set": "assignments",
    "--jobs": "jobs",
}
"""The others."""


@dataclass(frozen=True, slots=True)
class Wish:
    """What the command line asks for."""

    file: Path | None = None
    trace: str = ""
    """Empty: the first `DEFAULT_REQUESTS` of `DEFAULT_TRACE`, or what part of it is wished."""
    model: str = ""
    speed: float = 1.0
    policies: tuple[str, ...] = ()
    fleets: tuple[str, ...] = ()
    replicas: int | None = None
    assignments: tuple[str, ...] = ()
    seed: int = 0
    seeds: int = 1
    requests: int | None = None
    from_s: float = 0.0
    until_s: float | None = None
    scales: str = "1"
    jobs: int | None = None


class Run(NamedTuple):
    """One replay."""

    seed: int
    scale: float
    policy: str
    fleet: str = ""
    """Who sizes it; empty: nobody."""

    @property
    def name(self) -> str:
        """As in tables."""
        return label(self.policy, self.fleet)


class Plan(NamedTuple):
    """Everything that is to be done."""

    wish: Wish
    """With a trace and policies."""
    cluster: SimCluster
    policies: tuple[str, ...]
    seeds: tuple[int, ...]
    scales: tuple[float, ...]
    jobs: int
    fleets: tuple[str, ...] = ()
    """Who sizes them; empty: they stay as they are."""

    @property
    def runs(self) -> list[Run]:
        """All replays; those of one seed together, as they share a workload."""
        return [
            Run(seed, scale, policy, fleet)
            for seed in self.seeds
            for scale in self.scales
            for policy in self.policies
            for fleet in self.fleets or ("",)
        ]

    @property
    def names(self) -> tuple[str, ...]:
        """Of the runs of one seed and scale."""
        return tuple(label(policy, fleet) for policy in self.policies for fleet in self.fleets or ("",))

    def at_scale(self, scale: float) -> SimCluster:
        """The cluster with steps that take `scale` times as long."""
        return self.cluster.model_copy(update={"speeds": tuple(speed / scale for speed in self.cluster.speeds)})

    def workload(self, seed: int) -> Workload:
        """What is replayed with a seed. Raises `UserError`."""
        wish = self.wish
        try:
            found = workload(wish.trace, Random(seed), wish.model)  # noqa: S311 - chance that can be repeated
        except BadTrace as error:
            raise UserError(f"--trace {error}") from error
        if wish.from_s or wish.until_s is not None:
            end_s = math.nextafter(found.arrivals[-1].at_s, math.inf)
            found = between(found, wish.from_s, end_s if wish.until_s is None else wish.until_s)
        if wish.requests is not None and wish.requests < len(found.arrivals):
            found = first(found, wish.requests)
        if not found.arrivals:
            raise UserError(f"{found.name}: this part of the trace has no requests.", WRONG_USAGE)
        return found if wish.speed == 1 else faster(found, wish.speed)


def plan(wish: Wish) -> Plan:
    """Check a wish. Raises `UserError` with all that is wrong with the options, or with the description."""
    wish = filled(wish)
    problems = list(_problems(wish))
    scales = _scales(wish.scales)
    if scales is None:
        problems.append(f"--scale: found {wish.scales!r}; allowed: up to {SCALES_MAX} numbers above 0, as 0.8,1,1.25")
    if problems or scales is None:
        raise UserError("\n".join(problems), WRONG_USAGE)
    cluster, policies = _cluster(wish), tuple(dict.fromkeys(wish.policies))
    fleets = tuple(dict.fromkeys(wish.fleets))
    if not fleets and cluster.scale is not None:
        fleets = (cluster.scale.policy.value,)
    _check_rivals(policies, fleets)
    seeds = tuple(range(wish.seed, wish.seed + wish.seeds))
    return Plan(wish, cluster, policies, seeds, scales, wish.jobs or os.cpu_count() or 1, fleets)


def _check_rivals(policies: Sequence[str], fleets: Sequence[str]) -> None:
    """Raise `UserError` if any policy would have to know replicas that come and go, and does not."""
    rivals = [policy for policy in policies if policy in RIVALS]
    if rivals and any(sizers.read(fleet).name not in (sizers.STATIC, sizers.PEAK) for fleet in fleets):
        text = f"--policy: {', '.join(rivals)} cannot be simulated with replicas that come and go; use --fleet static"
        raise UserError(text, WRONG_USAGE)


def filled(wish: Wish) -> Wish:
    """With a trace and policies, where none are wished."""
    is_part = bool(wish.requests is not None or wish.from_s or wish.until_s is not None)
    wish = replace(wish, policies=wish.policies or (DEFAULT_OF_FLEETS if wish.fleets else DEFAULT_POLICIES))
    if wish.trace:
        return wish
    is_whole = is_part or wish.fleets  # a quarter of an hour is too short for starts to count
    return replace(wish, trace=DEFAULT_TRACE, requests=wish.requests if is_whole else DEFAULT_REQUESTS)


def command(wish: Wish) -> str:
    """The line for a shell that a filled wish comes from, without what changes no figure."""
    words = ["forebay", "simulate", *([str(wish.file)] if wish.file else []), "--trace", wish.trace]
    words += [word for policy in wish.policies for word in ("--policy", policy)]
    words += [word for fleet in wish.fleets for word in ("--fleet", fleet)]
    words += [word for option, value in wished(wish, OPTIONS).items() for word in (option, str(value))]
    words += [word for assignment in wish.assignments for word in ("--set", assignment)]
    return shlex.join(words)


def wished(wish: Wish, options: Mapping[str, str]) -> dict[str, object]:
    """Of these options (→ fields) the ones that are not as by default, with their values."""
    usual = Wish()
    values = {option: getattr(wish, field) for option, field in options.items()}
    return {option: value for option, value in values.items() if value != getattr(usual, options[option])}


def alone(mode: str, wish: Wish, report: Path | None, *, takes: Collection[str]) -> None:
    """Raise `UserError` if there is any other option than those that a mode takes."""
    found = [*wished(wish, {**MORE_OPTIONS, **OPTIONS}), *(["--report"] if report else [])]
    other = [option for option in found if option not in takes]
    if other:
        allowed = " and ".join((*takes, "--json"))
        raise UserError(f"{mode}: found {', '.join(other)} beside it; allowed: {allowed}", WRONG_USAGE)


def _problems(wish: Wish) -> Iterator[str]:
    for policy in wish.policies:
        if policy not in POLICIES:
            yield f"--policy: found {policy!r}{_guess(policy, POLICIES)}; allowed: {', '.join(POLICIES)}"
    for fleet in wish.fleets:
        try:
            sizers.read(fleet)
        except ValueError as error:
            yield f"--fleet: found {fleet!r}{_guess(fleet, sizers.NAMES)}; allowed: {error}"
    if wish.trace not in NAMES and not Path(wish.trace).exists():
        found = f"{wish.trace!r}{_guess(wish.trace, NAMES)}"
        yield f"--trace: found {found}; allowed: {', '.join(NAMES)}, or an existing file or folder"
    if not 0 < wish.speed <= SPEED_MAX:
        yield f"--speed: found {wish.speed:g}; allowed: above 0, to {SPEED_MAX:g}"
    if not 1 <= wish.seeds <= SEEDS_MAX:
        yield f"--seeds: found {wish.seeds}; allowed: 1 to {SEEDS_MAX}"
    if not 0 <= wish.seed <= SEED_MAX:
        yield f"--seed: found {wish.seed}; allowed: 0 to {SEED_MAX}"
    if wish.requests is not None and wish.requests < 1:
        yield f"--requests: found {wish.requests}; allowed: 1 or more"
    if not 0 <= wish.from_s < math.inf:
        yield f"--from: found {wish.from_s:g}; allowed: 0 or more, seconds"
    if wish.until_s is not None and not wish.from_s < wish.until_s:
        yield f"--until: found {wish.until_s:g}; allowed: more than --from, seconds"
    if wish.jobs is not None and wish.jobs < 1:
        yield f"--jobs: found {wish.jobs}; allowed: 1 or more"


def _scales(text: str) -> tuple[float, ...] | None:
    try:
        scales = tuple(dict.fromkeys(float(part) for part in text.split(",")))
    except ValueError:
        return None
    return scales if len(scales) <= SCALES_MAX and all(0 < scale < math.inf for scale in scales) else None


def _guess(word: str, words: Sequence[str]) -> str:
    close = difflib.get_close_matches(word, words, n=1)
    return f" (did you mean {close[0]}?)" if close else ""


def _cluster(wish: Wish) -> SimCluster:
    name, text = DEFAULTS_NAME, b""
    if wish.file is not None:
        name = str(wish.file)
        try:
            with wish.file.open("rb") as file:
                text = file.read(FILE_BYTES_MAX + 1)
        except OSError as error:
            raise UserError(f"{wish.file}: cannot be read ({error.strerror}).") from None
    overrides = set_overrides(wish.assignments)
    if wish.replicas is not None:
        overrides["replicas"] = str(wish.replicas)
    try:
        return clusterfile.load_as(SimCluster, text, name, overrides, agree=_conflicts)
    except clusterfile.ClusterFileError as error:
        raise UserError(error.listing("nothing was simulated")) from None


def _conflicts(root: Mapping[str, Any]) -> Iterable[Conflict]:
    if "models" in root:
        yield Conflict(
            "models", "a cluster file of `forebay up`", "a description of GPUs and one model: docs/simulate.md"
        )
    yield from _unknown_hardware(root)
    model = {key: root[key] for key in ("replicas", "scale") if key in root} | {"slo": {"ttft_p99_ms": 1}}
    for conflict in scale_conflicts({"models": [model]}):
        yield conflict._replace(path=conflict.path.removeprefix("models[0]."))


def _unknown_hardware(root: Mapping[str, Any]) -> Iterable[Conflict]:
    """Each of these may be fine alone, but step times are known for some combinations only."""
    keys = ("gpu", "model", "tensor_parallel", "precision")
    gpu, model, gpus, precision = (root.get(key, SimCluster.model_fields[key].default) for key in keys)
    if not isinstance(gpus, int) or not all(isinstance(each, str) for each in (gpu, model, precision)):
        return
    known = rows()
    wanted = (gpu, model, gpus, precision)
    there_is = [(row.gpu, row.model, row.gpus, row.precision) for row in known]
    if wanted not in there_is:
        unheard = [key for at, key in enumerate(keys) if wanted[at] not in {each[at] for each in there_is}]
        where = next((key for key in (*unheard, *keys) if key in root), keys[0])
        names = ", ".join(row.name for row in known)
        yield Conflict(where, f"{gpu}/{model}/tp{gpus}/{precision}", f"one of {names}")
