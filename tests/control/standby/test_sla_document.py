"""The SLA document of the admin API, and invalid queries."""

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import httpx
import pytest
from tests.control.api.rig import IdleControl, services
from tests.control.deploying.world import artifact

from forebay.control.api.app import make_app
from forebay.control.journal import Journal
from forebay.control.loop import Controller
from forebay.control.plan import Places, make_plan
from forebay.control.standby.history import AvailabilityHistory
from forebay.control.standby.sla import Served
from forebay.control.standby.standby import Standby
from forebay.core.availability.budget import Requests
from forebay.core.availability.history import AvailabilitySums, Incident, IncidentKind
from forebay.core.availability.measured import LifetimeSums
from forebay.core.cluster import Cluster, Slo
from forebay.obs.clock import wall_s
from forebay.obs.metrics import Metrics

MODELS: list[dict[str, Any]] = [
    {"name": "chat", "replicas": 2, "standby": 1, "slo": {"availability": 0.999}},
    {"name": "solo"},
]


@dataclass
class ApiRigParts:
    """The parts of a rig that the API needs."""

    control: Controller
    journal: Journal
    metrics: Metrics


class IdleControlWithHistory:
    """A control that is not started, with a history of availability."""

    def __init__(self, folder: Path, *, kept: bool = True) -> None:
        idle = IdleControl(folder)
        self.folder, self.control, self.journal, self.metrics = folder, idle.control, idle.journal, idle.metrics
        models = [{"task": "chat", "source": "x", "engine": "synthetic", **model} for model in MODELS]
        artifacts = {model["name"]: artifact("old") for model in models}
        plan = make_plan(Cluster.model_validate({"models": models}), artifacts, Places(folder), "0")
        self.now = wall_s()
        self.history = AvailabilityHistory(folder / "availability", self.journal, self.now)
        self.standby = Standby(self.metrics, self.journal.note, self.history if kept else None)
        self.control.standby = self.standby
        self.control.plan = self.standby.pooled(plan)

    def asks(self, **query: str | int) -> tuple[int, dict[str, Any]]:
        def delivered(since: float, until: float, promised: Mapping[str, Slo]) -> Mapping[str, Served]:
            assert until - since > 0
            return {"chat": Served(Requests(since, until, ok=1999, failed=1))} if "chat" in promised else {}

        rig = ApiRigParts(self.control, self.journal, self.metrics)
        parts = replace(services(rig, self.folder), delivered=delivered)

        async def asked() -> httpx.Response:
            transport = httpx.ASGITransport(make_app(parts))
            async with httpx.AsyncClient(transport=transport, base_url="http://admin") as client:
                return await client.get("/v1/sla", params=query)

        answer = asyncio.run(asked())
        self.journal.close()
        return answer.status_code, answer.json()


def test_sla_reports_promise_delivery_and_budget(tmp_path: Path) -> None:
    place = IdleControlWithHistory(tmp_path)
    day_s = 86_400.0
    lived = LifetimeSums(60 * day_s, failures=5, repairs=5, repair_s=500.0, promotions=5, promotion_s=0.5)
    place.history._add("chat", AvailabilitySums(3000.0, 2900.0, 2800.0, lived), place.now)
    for model in ("chat", ""):
        place.history._add_incident(Incident(place.now - 1, IncidentKind.FAILURE, model, "chat-0", "died", 3.0))
    status, said = place.asks(period_s=int(30 * day_s))
    chat, solo = said["models"]

    assert status == 200
    assert [model["name"] for model in said["models"]] == ["chat", "solo"]
    promise = chat["promise"]
    assert (promise["serve"], promise["spares"], promise["failures"]) == (2, 1, 5)
    assert promise["mtbf_s"] == 90 * day_s / 6
    assert (promise["switch_s"], promise["promotions"]) == (pytest.approx(0.4), 5)
    assert promise["start_s"] is None
    assert promise["enough"] > promise["full"] > 0.999999
    assert (chat["up_s"], chat["down_s"], chat["full_s"], chat["availability"]) == (2900, 100, 2800, 2900 / 3000)
    assert chat["budget"]["allowed_s"] > 2591.9
    assert chat["budget"]["spent_s"] == 100
    assert chat["budget"]["allowed_requests"] == 2000 * 0.001 or abs(chat["budget"]["allowed_requests"] - 2) < 1e-9
    assert chat["success"] == 0.9995
    assert [each["unit"] for each in chat["incidents"]] == ["chat-0"]
    assert len(said["incidents"]) == 1
    assert (solo["target"], solo["budget"], solo["requests"], solo["availability"]) == (None, None, None, None)
    assert solo["promise"]["spares_needed"] is None
    assert solo["gaps"][0]["unknown_s"] == solo["unknown_s"]


def test_sla_of_one_model_and_invalid_queries(tmp_path: Path) -> None:
    _, said = IdleControlWithHistory(tmp_path).asks(model="solo", period_s=3600)
    assert [model["name"] for model in said["models"]] == ["solo"]
    for query, status in (({"model": "nobody"}, 404), ({"period_s": 0}, 400), ({"period_s": 10**9}, 400)):
        assert IdleControlWithHistory(tmp_path).asks(**query)[0] == status
    assert "there is: chat, solo" in IdleControlWithHistory(tmp_path).asks(model="nobody")[1]["error"]["message"]
    assert IdleControlWithHistory(tmp_path, kept=False).asks()[0] == 409


def test_sla_is_up_to_date_while_the_disk_accepts_nothing(tmp_path: Path) -> None:
    place = IdleControlWithHistory(tmp_path)
    place.history._add("chat", AvailabilitySums(3000.0, 2900.0, 2800.0), place.now)
    (tmp_path / "availability").touch()  # so that no file can be written below it

    status, said = place.asks()
    assert (status, said["models"][0]["up_s"]) == (200, 2900)
