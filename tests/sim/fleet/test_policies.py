"""Fleet sizing policies by name: parsing, effect of the description, and quality of plans."""

import re
from random import Random

import pytest

from forebay.core.scaling.settings import Policy, ScaleSettings
from forebay.sim.fleet import policies
from forebay.sim.fleet.loads import ticks
from forebay.sim.fleet.policies import (
    HELD,
    NAMES,
    STATIC,
    USUAL,
    SizingSpec,
    cold_start_s,
    computed,
    parse_sizing,
    scale_of,
    sizing,
)
from forebay.sim.fleet.response import Measured
from forebay.sim.fleet.sizers import peak
from forebay.sim.load.columns import columns
from forebay.sim.load.describe import describe
from forebay.sim.load.made import hot_prefix
from forebay.sim.load.values import Arrival, Workload
from forebay.sim.replay.cluster import Promise, SimCluster

EMPTY = Workload("none", ())


@pytest.mark.parametrize("name", NAMES)
def test_every_sizing_name_is_parsed(name: str) -> None:
    assert parse_sizing(name) == SizingSpec(name)


@pytest.mark.parametrize(
    ("text", "spec"),
    [
        ("static@12", SizingSpec(STATIC, 12)),
        ("hpa@0.7", SizingSpec("hpa", 0.7)),
        ("apa@1e3", SizingSpec("apa", 1000)),
    ],
)
def test_sizing_name_may_have_a_number(text: str, spec: SizingSpec) -> None:
    assert parse_sizing(text) == spec


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", "forebay, hpa[@TARGET]"),
        ("cpr", "static[@N], peak, oracle"),
        ("oracle@3", "peak, oracle"),
        ("forebay@3", "forebay, hpa"),
        ("static@0", "static@N with 1 to 256"),
        ("static@2.5", "static@N with 1 to 256"),
        ("static@257", "static@N with 1 to 256"),
        ("hpa@", "hpa@TARGET with more than 0"),
        ("kpa@-1", "kpa@TARGET with more than 0"),
        ("apa@nan", "apa@TARGET with more than 0"),
    ],
)
def test_unknown_sizing_name_is_rejected_with_the_allowed_ones(text: str, says: str) -> None:
    with pytest.raises(ValueError, match=re.escape(says)):
        parse_sizing(text)


def test_policy_sizing_uses_the_scale_settings_of_the_cluster() -> None:
    settings = ScaleSettings(max=9, min=2, policy=Policy.KPA, target=16.0)
    cluster = SimCluster(scale=settings)

    assert scale_of(cluster, SizingSpec("kpa")) == settings.value(cluster.slo.ttft_s, cluster.slo.tpot_s)
    for name in HELD:
        found = scale_of(cluster, SizingSpec(name, 4.0))
        assert (found.policy, found.target, found.min, found.max) == (Policy(name), 4.0, 2, 9)
    ours = scale_of(cluster, SizingSpec("forebay"))
    assert (ours.policy, ours.ttft_s, ours.tpot_s) == (Policy.FOREBAY, 5.0, 0.1)
    assert ours.down.window_s == 300.0
    assert scale_of(SimCluster(), SizingSpec("hpa")).max == USUAL.max


@pytest.mark.parametrize(
    ("cluster", "name", "begin", "on_demand"),
    [
        (SimCluster(replicas=5), "forebay", 5, False),
        (SimCluster(replicas=5, scale=ScaleSettings(max=3)), "forebay", 3, False),
        (SimCluster(replicas=5, scale=ScaleSettings(max=9, min=7)), "hpa", 7, False),
        (SimCluster(replicas=5, scale=ScaleSettings(max=9, min=0)), "slo", 5, True),
        (SimCluster(replicas=5), "static", 5, False),
        (SimCluster(replicas=5), "static@7", 7, False),
    ],
)
def test_initial_size_follows_the_description_within_bounds(
    cluster: SimCluster, name: str, begin: int, on_demand: bool
) -> None:
    found = sizing(name, cluster, EMPTY)

    assert (found.begin, found.on_demand) == (begin, on_demand)
    assert (found.sizer is None) == name.startswith("static")


def test_cold_start_time_is_configured_or_that_of_the_hardware() -> None:
    assert cold_start_s(SimCluster(start_s=12.0)) == 12.0
    assert cold_start_s(SimCluster()) == pytest.approx(97.5)
    assert sizing("forebay", SimCluster(start_s=12.0), EMPTY).start_s == 12.0


def test_computed_load_excludes_shared_prompt_prefixes() -> None:
    load = hot_prefix(Random(1), requests=200)
    cold, warm = computed(load), columns(load.arrivals)
    share = 1 - sum(cold.prompt_tokens) / sum(warm.prompt_tokens)

    assert share == pytest.approx(describe(load).hit_share, abs=0.01)
    assert cold.output_tokens == warm.output_tokens
    plain = Workload("plain", (Arrival(0.0, 100, 5),))
    assert list(computed(plain).prompt_tokens) == [100]


def made(rates_per_s: list[float], each_s: float) -> Workload:
    """A rate for each stretch of time."""
    arrivals = []
    for at, rate_per_s in enumerate(rates_per_s):
        count = int(rate_per_s * each_s)
        arrivals += [Arrival(at * each_s + number / rate_per_s, 1000, 100) for number in range(count)]
    return Workload("made", tuple(arrivals))


def believe(patch: pytest.MonkeyPatch, requests_per_s: float) -> None:
    """A replica is said to answer so many, all of them well up to nine tenths of that."""

    def measured(cluster: SimCluster, mix: object) -> Measured:
        loads = [at / 10 for at in range(1, 11)]
        point = [[*[float(load <= 0.9)] * 26, load * 10, load, load, 0.5, 0.05] for load in loads]
        return Measured(requests_per_s, [point] * 4)

    patch.setattr(policies, "measured", measured)


@pytest.mark.slow
def test_peak_and_oracle_sizings_meet_the_objective(monkeypatch: pytest.MonkeyPatch) -> None:
    believe(monkeypatch, 0.2)
    load, cluster = made([0.2, 0.8, 0.2, 0.2], 600.0), SimCluster(start_s=60.0)
    fewest, oracle = sizing("peak", cluster, load).begin, sizing("oracle", cluster, load)
    looks = [oracle.begin]
    assert oracle.sizer is not None
    for now in range(1, 2400):
        looks.append(oracle.sizer.size(None, float(now), looks[-1]))

    assert 4 <= fewest <= 5
    assert oracle.begin == looks[300] < 3
    assert max(looks) == looks[599] == looks[900] >= 4
    assert looks[500] < looks[560], "ordered one slow start ahead"
    assert looks[-1] == oracle.begin


@pytest.mark.slow
@pytest.mark.parametrize("name", ["peak", "oracle"])
def test_planned_sizing_grows_until_the_objective_is_met_or_growth_stops_helping(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    believe(monkeypatch, 20.0)
    burst = Workload("burst", tuple(Arrival(0.01 * number, 2000, 200) for number in range(200)))
    cluster = SimCluster(slo=Promise(ttft_s=0.5, tpot_s=0.05))
    hopeless = SimCluster(slo=Promise(ttft_s=0.001))
    planned = peak(ticks(burst), policies.planned(cluster, burst)[1])

    grown = sizing(name, cluster, burst).begin
    assert planned < grown <= 2 * planned
    monkeypatch.setattr(policies, "TRIED_MAX", 199)
    assert sizing(name, cluster, burst).begin == planned
    monkeypatch.setattr(policies, "TRIED_MAX", 200)
    assert sizing(name, hopeless, burst).begin == peak(ticks(burst), policies.planned(hopeless, burst)[1])
