"""The policy `forebay`: capacity, forecasts, overload, and no removal of needed replicas."""

import math
from dataclasses import replace
from random import Random

import msgspec
import pytest
from tests.core.scaling.autoscaled_model import BUSY, QUIET, T0, Model, turns

from forebay.core.scaling.decide import decide
from forebay.core.scaling.learned import Learned, wish
from forebay.core.scaling.settings import Scale
from forebay.core.scaling.state import AutoscalerState
from forebay.core.scaling.values import Reason

SCALE = Scale(30, ttft_s=1.0, tpot_s=0.1)


def after_load(model: Model, seconds: float, per_s: float, noise: float = 0.0, seed: int = 1) -> Model:
    rng = Random(seed)
    for _ in range(int(seconds / model.tick_s)):
        model.look(max(per_s * (1 + noise * rng.gauss(0, 1)), 0.0))
    return model


@pytest.fixture(scope="module")
def learned_state() -> AutoscalerState:
    """Of a model whose load has gone up and down for hours, twice over."""
    model = Model(SCALE, replicas=2, tick_s=10.0)
    for tick in range(1200):
        model.look(20 * (1.1 + math.sin(tick / 100)) * (1 + 0.1 * math.sin(tick)))
    return model.state


def resumed(state: AutoscalerState, replicas: int, cold_s: float = 60.0) -> Model:
    assert state.known_at
    return Model(SCALE, replicas=replicas, state=state, now=state.known_at, cold_s=cold_s, tick_s=10.0)


def test_capacity_of_a_replica_is_learned_under_load(learned_state: AutoscalerState) -> None:
    able, free = learned_state.learned.capacity, learned_state.learned.capacity.free

    assert able.known
    assert 600 * 4 * 0.7 < able.of(8) / (8 - free * math.sqrt(8)) < 600 * 4 * 1.4


@pytest.mark.slow
@pytest.mark.parametrize("seed", [1, 2])
def test_constant_load_changes_the_replica_count_at_most_twice_an_hour(
    learned_state: AutoscalerState, seed: int
) -> None:
    model = after_load(resumed(learned_state, 8), 2 * 3600, 22.0, noise=0.15, seed=seed)

    assert turns(model.wanted) <= 4
    assert model.late / model.answers < 0.01


@pytest.mark.slow
def test_five_times_the_load_is_served_within_a_cold_start_and_a_minute(learned_state: AutoscalerState) -> None:
    model = after_load(resumed(learned_state, 3, cold_s=100.0), 1800, 4.0)
    before = model.replicas
    after_load(model, 160, 20.0)
    model.late = model.answers = 0.0

    after_load(model, 300, 20.0)

    assert model.replicas >= 2 * before
    assert model.late / model.answers < 0.02
    assert Reason.PANIC in {decision.reason for decision in model.decisions}


@pytest.mark.slow
def test_surplus_replicas_are_removed_and_the_rest_suffices(learned_state: AutoscalerState) -> None:
    model = after_load(resumed(learned_state, 20), 3600, 20.0)

    assert 5 < model.replicas < 12
    assert model.late / model.answers < 0.01
    assert {Reason.SPARE, Reason.STEADY} <= {decision.reason for decision in model.decisions}


def test_no_replica_is_removed_while_requests_wait(learned_state: AutoscalerState) -> None:
    model = after_load(resumed(learned_state, 12), 900, 4.0)
    reading = replace(BUSY, at=model.now + 5, since_s=5.0, ready=model.replicas, waiting=3)

    decision, _ = wish(SCALE, model.state.learned, reading, reading.at, 12)

    assert decision.wanted == 12
    assert "but requests wait" in decision.why


def test_closed_loop_clients_are_scaled_by_concurrency() -> None:
    """Sixteen of them get no more from one replica than it does; with late answers it is too little all the same."""
    state, current, wanted = AutoscalerState(), 1, []
    for tick in range(500):
        each = 16 / current
        rate = current * 4 * each / (each + 2)
        late = 0.12 if each > 6 else 0.0
        reading = replace(
            BUSY, at=T0 + tick * 5, ready=current, arrivals=round(rate * 5), completions=round(rate * 5),
            prompt_tokens=round(rate * 2500), output_tokens=round(rate * 500), in_flight=16.0,
            late=round(late * rate * 5), cold_start_s=5.0,
        )  # fmt: skip
        decision, state = decide(
            Scale(6, ttft_s=1.0, down=replace(SCALE.down, window_s=20.0)),
            state,
            reading,
            reading.at,
            current=current,
        )
        current = decision.wanted
        wanted.append(current)

    assert set(wanted[300:]) == {3}


def test_first_replica_after_idling_starts_alone_for_a_load_that_one_can_serve() -> None:
    """And the load of a minute ago is still there: nobody was asked for some seconds only."""
    little = replace(
        QUIET, since_s=5.0, ready=3, arrivals=25, prompt_tokens=350, completions=25, in_flight=0.1, busy=0.1,
        cold_start_s=5.0,
    )  # fmt: skip
    state, scale = AutoscalerState(), Scale(9, 0, latency_s=60.0)
    for tick in range(60):
        _, state = decide(scale, state, replace(little, at=T0 + tick * 5), T0 + tick * 5, current=3)
    borne = state.learned.capacity
    asked = replace(QUIET, at=T0 + 300, ready=0, arrivals=1, prompt_tokens=14, waiting=1, in_flight=1.0)

    woken, _ = decide(scale, state, asked, asked.at, current=0)

    assert borne.need(state.learned.traffic.level) > 1
    assert (woken.wanted, woken.reason) == (1, Reason.WAKE)


@pytest.mark.slow
@pytest.mark.parametrize("anyway", [0.02, 0.05, 0.1])
def test_only_answers_late_because_of_load_add_replicas(
    anyway: float,
) -> None:
    usual, odd = (
        after_load(Model(SCALE, 8, tick_s=10.0, anyway=share), 8 * 3600, 20.0, 0.1) for share in (0.0, anyway)
    )

    assert abs(odd.replicas - usual.replicas) <= 1
    assert odd.decisions[-1].figures["late_anyway"] == pytest.approx(anyway, rel=0.2)
    assert usual.decisions[-1].figures["late_anyway"] == 0
    assert after_load(odd, 600, 60.0).replicas >= 2 * usual.replicas


def test_unattainable_objective_does_not_scale_out() -> None:
    model = Model(SCALE, replicas=1)

    for _ in range(400):
        model.look(0.2, late=1, completions=1)

    assert max(model.wanted) <= 2


@pytest.mark.slow
@pytest.mark.parametrize(
    "scale",
    [Scale(30, ttft_s=1.0), Scale(30, tpot_s=0.1), Scale(30, latency_s=2.0), Scale(30)],
    ids=["ttft", "tpot", "latency", "nothing"],
)
def test_capacity_is_learned_from_latencies_without_counts_of_late_answers(scale: Scale) -> None:
    model = Model(scale, replicas=2, cold_s=30.0, tick_s=10.0)
    for tick in range(500):
        per_s = 10 * (1.1 + math.sin(tick / 50))
        use = min(per_s / model.ready / model.each_per_s, 0.99)
        dense = 1 + use**3 / (1 - use)
        model.look(per_s, late=None, ttft_s=0.1 * dense**2, tpot_s=0.03 * dense)

    assert model.state.learned.capacity.known
    assert model.late / model.answers < 0.1
    assert 2 < max(model.wanted[250:]) < 20


def test_slow_requests_without_concurrency_do_not_add_replicas() -> None:
    """Three clients, answers of 2 s whatever there is, 4 s promised: three replicas are as quick as any number."""
    state, current, wanted = AutoscalerState(), 1, []
    for tick in range(500):
        reading = replace(
            BUSY, at=T0 + tick * 5, ready=current, arrivals=8, completions=8, in_flight=3.0, late=None, ttft_s=None
        )
        decision, state = decide(Scale(20, latency_s=4.0), state, reading, reading.at, current=current)
        current = decision.wanted
        wanted.append(current)

    assert max(wanted) == 3


def test_responses_without_latency_teach_no_capacity() -> None:
    model = Model(Scale(30, ttft_s=1.0), replicas=2)

    for _ in range(100):
        model.look(1.0, late=None, ttft_s=None)

    assert model.state.learned.cells == ()


def test_latencies_are_compared_with_objectives_where_late_answers_are_not_counted() -> None:
    slow, fast = Model(SCALE, replicas=2), Model(SCALE, replicas=2)

    for _ in range(100):
        slow.look(1.0, late=None, ttft_s=0.5, tpot_s=9.0)
        fast.look(1.0, late=None, ttft_s=0.01, tpot_s=0.001)

    assert slow.state.learned.strain > 1 > fast.state.learned.strain


def test_answers_delayed_by_a_cold_start_do_not_count_as_strain(learned_state: AutoscalerState) -> None:
    model = Model(Scale(5, 0, ttft_s=1.0), replicas=0, cold_s=50.0)

    after_load(model, 110, 0.4)
    after_load(model, 300, 0.4)

    assert max(model.wanted) == 1
    assert model.state.learned.strain == 0.0


def test_lead_time_is_configured_or_measured() -> None:
    reading = replace(BUSY, cold_start_s=200.0)

    _, measured = wish(SCALE, Learned(), reading, T0, 1)
    _, kept = wish(SCALE, measured, BUSY, T0, 1)
    _, said = wish(replace(SCALE, lead_s=10.0), measured, reading, T0, 1)

    assert (measured.lead_s, kept.lead_s, said.lead_s) == (200.0, 200.0, 10.0)


def test_autoscaler_state_size_is_bounded(learned_state: AutoscalerState) -> None:
    assert len(msgspec.json.encode(learned_state)) < 40_000
