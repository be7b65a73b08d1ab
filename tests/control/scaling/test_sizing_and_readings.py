"""Parts of the scaler alone: sized plans, start times, readings."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tests.control.deploying.world import artifact

from forebay.control.plan import Places, Plan, make_plan
from forebay.control.scaling.collecting import Collected
from forebay.control.scaling.reading import Look, make_reading
from forebay.control.scaling.sizing import Size, Sizer
from forebay.control.scaling.starts import KEPT, REVISIONS_MAX, Starts, cold_start_s, with_start
from forebay.core.cluster import Cluster, Slo
from forebay.core.lifecycle import Event
from forebay.core.model import LoadReport, ReplicaState
from forebay.core.pressure import TrafficCounters
from forebay.core.reconcile import Move, SlotState, State
from forebay.obs.metrics import SECONDS, TOKEN_SECONDS

READY, STARTING = ReplicaState.READY, ReplicaState.STARTING


def plan(folder: Path, replicas: int = 2) -> Plan:
    models = [
        {"name": name, "task": "chat", "source": "x", "engine": "synthetic", "replicas": replicas}
        for name in ("chat", "other")
    ]
    cluster = Cluster.model_validate({"models": models})
    return make_plan(cluster, {name: artifact("old") for name in ("chat", "other")}, Places(folder), "0")


@pytest.mark.parametrize("several", [0, 1, 2, 5])
def test_sized_model_has_the_first_slots_and_the_next_as_spare(tmp_path: Path, several: int) -> None:
    sizer, whole = Sizer(), plan(tmp_path)
    sized = sizer.sized(whole, {"chat": Size(several, several == 0, 3.0)})
    [chat, other] = sized.models
    assert [slot.id for slot in chat.slots] == [f"chat-{index}" for index in range(several)]
    assert chat.spare is not None
    assert (chat.spare.id, chat.routes.on_demand, chat.routes.start_s) == (f"chat-{several}", several == 0, 3.0)
    assert other is whole.models[1]
    larger = plan(tmp_path, max(several, 1)).models[0]
    assert all(slot.digest == wanted.digest for slot, wanted in zip(chat.slots, larger.slots, strict=several > 0))


def test_sizer_caches_models_and_slots(tmp_path: Path) -> None:
    sizer, whole = Sizer(), plan(tmp_path)
    large = sizer.sized(whole, {"chat": Size(6)}).models[0]
    assert sizer.sized(whole, {"chat": Size(6)}).models[0] is large
    small = sizer.sized(whole, {"chat": Size(4)}).models[0]
    assert all(a is b for a, b in zip(small.slots, large.slots, strict=False))
    assert sizer.sized(whole, {"chat": Size(2)}).models[0].slots == whole.models[0].slots
    assert sizer.sized(whole, {}) is whole
    without = replace(whole, models=whole.models[1:])
    assert sizer.sized(without, {}) is without


def moved(event: Event, slot: str = "chat-0", generation: int = 1) -> Move:
    return Move(slot, generation, STARTING, READY, event, "")


def test_start_time_is_measured_from_placed_to_ready() -> None:
    starts = Starts()
    assert starts.look([moved(Event.PLACED), moved(Event.PLACED, "my-chat-1")], 10.0) == []
    assert starts.look([moved(Event.LOADS)], 12.0) == []
    assert starts.look([moved(Event.SERVES)], 15.0) == [("chat", "chat-0", 5.0)]
    assert starts.look([moved(Event.SERVES)], 16.0) == []
    assert starts.look([moved(Event.DIED, "my-chat-1"), moved(Event.SERVES, "my-chat-1")], 17.0) == []
    assert starts.look([moved(Event.ADOPTED, "x-0"), moved(Event.SERVES, "x-0")], 18.0) == []


def test_cold_start_estimate_falls_back_to_the_latest_revision() -> None:
    taken: dict[str, tuple[float, ...]] = {}
    assert cold_start_s(taken, "a") is None
    for seconds in range(1, 31):
        taken = with_start(taken, "a", float(seconds))
    assert len(taken["a"]) == KEPT
    assert cold_start_s(taken, "a") == 29.0
    taken = with_start(taken, "b", 99.0)
    assert (cold_start_s(taken, "a"), cold_start_s(taken, "new")) == (29.0, 99.0)
    for name in "cdefghijk":
        taken = with_start(taken, name, 1.0)
    assert len(taken) == REVISIONS_MAX
    assert "a" not in taken


def look(**more: Any) -> Look:
    """Three slots: two ready ones of the old revision, of which one rests, and one of the new."""
    states = (("chat-0", READY), ("chat-1", READY), ("chat-2", READY), ("chat-3", STARTING), ("chatty-0", READY))
    state = State(tuple(SlotState(id, 0.0, each, generation=1) for id, each in states))
    reports = {
        (id, 1): LoadReport(id, 1, "chat", revision, READY, in_flight=2, capacity=4, kv_used_tokens=30,
                            kv_total_tokens=100)
        for id, revision in (("chat-0", "old"), ("chat-1", "old"), ("chat-2", "new"))
    }  # fmt: skip
    return Look(state, (), reports)._replace(**more)


PRESSED = TrafficCounters(
    10, 1, 100, 8, 80, 6.0, (0,) * 9 + (8, 0) + (0,) * 7, (0,) * (len(TOKEN_SECONDS) + 1), 3, 30, 12
)


def test_reading_combines_gateways_and_replicas() -> None:
    assert len(PRESSED.ttft) == len(SECONDS) + 1
    slo = Slo(ttft_p99_ms=750.0)
    found = make_reading("chat", slo, Collected(2.0, {"chat": PRESSED}), look(), at=5.0, cold_start_s=4.0)
    assert found is not None
    assert (found.ready, found.pending, found.arrivals, found.refused) == (3, 1, 10, 1)
    assert (found.in_flight, found.backlog_tokens, found.kv_use, found.busy) == (3.0, 42, 0.3, 0.5)
    assert (found.ttft_s, found.tpot_s, found.late, found.duty) == (0.95, None, 4, None)
    assert (found.predicted_ttft_s, found.predicted_tpot_s, found.gpus) == (None, None, 0.0)
    predicted = Collected(2.0, {"chat": replace(PRESSED, predicted_ttft_s=0.4, predicted_tpot_s=0.02)})
    found = make_reading("chat", slo, predicted, look(), at=5.0, cold_start_s=4.0, gpus=0.5)
    assert found is not None
    assert (found.predicted_ttft_s, found.predicted_tpot_s, found.gpus) == (0.4, 0.02, 0.5)


def test_reading_excludes_standby_and_counts_the_larger_revision() -> None:
    collected = Collected(1.0, {"chat": PRESSED})
    standbys = look(standbys={("chat-1", 1)}, duty={"chat": 0.8})
    found = make_reading("chat", Slo(), collected, standbys, at=0.0, cold_start_s=None)
    assert found is not None
    assert (found.ready, found.late, found.duty) == (2, None, 0.8)
    rolling = make_reading("chat", Slo(), collected, look(rolling={"chat"}), at=0.0, cold_start_s=None)
    assert rolling is not None
    assert rolling.ready == 2


def test_reading_requires_every_gateway() -> None:
    assert make_reading("chat", Slo(), None, look(), at=0.0, cold_start_s=None) is None
    assert make_reading("chat", Slo(), Collected(1.0, {}), look(), at=0.0, cold_start_s=None) is None
