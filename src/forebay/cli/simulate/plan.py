"""Turns options into a plan of replays, or reports all problems with them."""

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
from forebay.core.errors import Conflict
from forebay.core.model import Policy
from forebay.core.scaling.settings import scale_conflicts
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
"""For comparisons of fleets."""
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
"""Options with a single value that affect figures → fields of `SimulationOptions`."""
MORE_OPTIONS: Final = {
    "FILE": "file",
    "--trace": "trace",
    "--policy": "policies",
    "--fleet": "fleets",
    "--set": "assignments",
    "--jobs": "jobs",
}
"""The other options."""


@dataclass(frozen=True, slots=True)
class SimulationOptions:
    """The options of the command line."""

    file: Path | None = None
    trace: str = ""
    """Empty: the first `DEFAULT_REQUESTS` of `DEFAULT_TRACE`, or the part of it that other options select."""
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
    """The autoscaling policy; empty: none."""

    @property
    def name(self) -> str:
        """The name in tables."""
        return label(self.policy, self.fleet)


class Plan(NamedTuple):
    """A validated simulation."""

    options: SimulationOptions
    """With trace and policies filled in."""
    cluster: SimCluster
    policies: tuple[str, ...]
    seeds: tuple[int, ...]
    scales: tuple[float, ...]
    jobs: int
    fleets: tuple[str, ...] = ()
    """The autoscaling policies; empty: the number of replicas is fixed."""

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
        """The names of the runs of one seed and scale."""
        return tuple(label(policy, fleet) for policy in self.policies for fleet in self.fleets or ("",))

    def at_scale(self, scale: float) -> SimCluster:
        """The cluster with step times multiplied by `scale`."""
        return self.cluster.model_copy(update={"speeds": tuple(speed / scale for speed in self.cluster.speeds)})

    def workload(self, seed: int) -> Workload:
        """The workload for a seed. Raises `UserError`."""
        options = self.options
        try:
            found = workload(options.trace, Random(seed), options.model)  # noqa: S311 - chance that can be repeated
        except BadTrace as error:
            raise UserError(f"--trace {error}") from error
        if options.from_s or options.until_s is not None:
            end_s = math.nextafter(found.arrivals[-1].at_s, math.inf)
            found = between(found, options.from_s, end_s if options.until_s is None else options.until_s)
        if options.requests is not None and options.requests < len(found.arrivals):
            found = first(found, options.requests)
        if not found.arrivals:
            raise UserError(f"{found.name}: this part of the trace has no requests.", WRONG_USAGE)
        return found if options.speed == 1 else faster(found, options.speed)


def plan(options: SimulationOptions) -> Plan:
    """Validate the options. Raises `UserError` with all problems of the options, or of the description."""
    options = with_defaults(options)
    problems = list(_problems(options))
    scales = _scales(options.scales)
    if scales is None:
        allowed = f"up to {SCALES_MAX} numbers above 0, as 0.8,1,1.25"
        problems.append(f"--scale: found {options.scales!r}; allowed: {allowed}")
    if problems or scales is None:
        raise UserError("\n".join(problems), WRONG_USAGE)
    cluster, policies = _cluster(options), tuple(dict.fromkeys(options.policies))
    fleets = tuple(dict.fromkeys(options.fleets))
    if not fleets and cluster.scale is not None:
        fleets = (cluster.scale.policy.value,)
    _check_rivals(policies, fleets)
    seeds = tuple(range(options.seed, options.seed + options.seeds))
    return Plan(options, cluster, policies, seeds, scales, options.jobs or os.cpu_count() or 1, fleets)


def _check_rivals(policies: Sequence[str], fleets: Sequence[str]) -> None:
    """Raise `UserError` for policies that do not support a changing number of replicas, if it may change."""
    rivals = [policy for policy in policies if policy in RIVALS]
    if rivals and any(sizers.parse_sizing(fleet).name not in (sizers.STATIC, sizers.PEAK) for fleet in fleets):
        why = "cannot be simulated with a changing number of replicas; use --fleet static"
        raise UserError(f"--policy: {', '.join(rivals)} {why}", WRONG_USAGE)


def with_defaults(options: SimulationOptions) -> SimulationOptions:
    """The options with default trace and policies filled in."""
    is_part = bool(options.requests is not None or options.from_s or options.until_s is not None)
    options = replace(
        options, policies=options.policies or (DEFAULT_OF_FLEETS if options.fleets else DEFAULT_POLICIES)
    )
    if options.trace:
        return options
    is_whole = is_part or options.fleets  # a quarter of an hour is too short for cold starts to matter
    return replace(options, trace=DEFAULT_TRACE, requests=options.requests if is_whole else DEFAULT_REQUESTS)


def command(options: SimulationOptions) -> str:
    """The shell command for filled options, without those that affect no figures."""
    words = ["forebay", "simulate", *([str(options.file)] if options.file else []), "--trace", options.trace]
    words += [word for policy in options.policies for word in ("--policy", policy)]
    words += [word for fleet in options.fleets for word in ("--fleet", fleet)]
    words += [word for option, value in non_default(options, OPTIONS).items() for word in (option, str(value))]
    words += [word for assignment in options.assignments for word in ("--set", assignment)]
    return shlex.join(words)


def non_default(options: SimulationOptions, fields: Mapping[str, str]) -> dict[str, object]:
    """Which of the options in `fields` (option → field) differ from their defaults, with their values."""
    usual = SimulationOptions()
    values = {option: getattr(options, field) for option, field in fields.items()}
    return {option: value for option, value in values.items() if value != getattr(usual, fields[option])}


def check_alone(mode: str, options: SimulationOptions, report: Path | None, *, takes: Collection[str]) -> None:
    """Raise `UserError` if there are options that a mode does not take."""
    found = [*non_default(options, {**MORE_OPTIONS, **OPTIONS}), *(["--report"] if report else [])]
    other = [option for option in found if option not in takes]
    if other:
        allowed = " and ".join((*takes, "--json"))
        raise UserError(f"{mode}: cannot be combined with {', '.join(other)}; allowed: {allowed}", WRONG_USAGE)


def _problems(options: SimulationOptions) -> Iterator[str]:
    for policy in options.policies:
        if policy not in POLICIES:
            yield f"--policy: found {policy!r}{_guess(policy, POLICIES)}; allowed: {', '.join(POLICIES)}"
    for fleet in options.fleets:
        try:
            sizers.parse_sizing(fleet)
        except ValueError as error:
            yield f"--fleet: found {fleet!r}{_guess(fleet, sizers.NAMES)}; allowed: {error}"
    if options.trace not in NAMES and not Path(options.trace).exists():
        found = f"{options.trace!r}{_guess(options.trace, NAMES)}"
        yield f"--trace: found {found}; allowed: {', '.join(NAMES)}, or an existing file or folder"
    if not 0 < options.speed <= SPEED_MAX:
        yield f"--speed: found {options.speed:g}; allowed: above 0, to {SPEED_MAX:g}"
    if not 1 <= options.seeds <= SEEDS_MAX:
        yield f"--seeds: found {options.seeds}; allowed: 1 to {SEEDS_MAX}"
    if not 0 <= options.seed <= SEED_MAX:
        yield f"--seed: found {options.seed}; allowed: 0 to {SEED_MAX}"
    if options.requests is not None and options.requests < 1:
        yield f"--requests: found {options.requests}; allowed: 1 or more"
    if not 0 <= options.from_s < math.inf:
        yield f"--from: found {options.from_s:g}; allowed: 0 or more, seconds"
    if options.until_s is not None and not options.from_s < options.until_s:
        yield f"--until: found {options.until_s:g}; allowed: more than --from, seconds"
    if options.jobs is not None and options.jobs < 1:
        yield f"--jobs: found {options.jobs}; allowed: 1 or more"


def _scales(text: str) -> tuple[float, ...] | None:
    try:
        scales = tuple(dict.fromkeys(float(part) for part in text.split(",")))
    except ValueError:
        return None
    return scales if len(scales) <= SCALES_MAX and all(0 < scale < math.inf for scale in scales) else None


def _guess(word: str, words: Sequence[str]) -> str:
    close = difflib.get_close_matches(word, words, n=1)
    return f" (did you mean {close[0]}?)" if close else ""


def _cluster(options: SimulationOptions) -> SimCluster:
    name, text = DEFAULTS_NAME, b""
    if options.file is not None:
        name = str(options.file)
        try:
            with options.file.open("rb") as file:
                text = file.read(FILE_BYTES_MAX + 1)
        except OSError as error:
            raise UserError(f"{options.file}: cannot be read ({error.strerror}).") from None
    overrides = set_overrides(options.assignments)
    if options.replicas is not None:
        overrides["replicas"] = str(options.replicas)
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
    """Each value may be valid alone, but step times are known for some combinations only."""
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
