"""Parts of deployments alone: request rates, and which replicas are compared and judged."""

from dataclasses import replace
from pathlib import Path

from forebay.control.plan import Artifact, Places, make_plan
from forebay.control.quality.client import ReplicaTarget
from forebay.control.rolling.judged import aims
from forebay.control.rolling.pace import Pace, requests_in
from forebay.core.cluster import Cluster
from forebay.core.deploy.counting import Counted
from forebay.core.deploy.course import COURSES, Kind
from forebay.core.deploy.rollout import Phase, Rollout
from forebay.core.deploy.slots import Held
from forebay.core.model import Replica, ReplicaState
from forebay.core.rollout import Rate, Rules, begin
from forebay.store.rollouts import Row

RULES = Rules((Rate("errors"),))


def test_request_rate_tolerates_gateway_restarts() -> None:
    page = (
        b"# TYPE forebay_requests_total counter\n"
        b'forebay_requests_total{model="chat",code="ok"} %d.0\n'
        b'forebay_requests_total{model="chat",code="internal_error"} 2.0\n'
        b'forebay_requests_total{model="embed",code="ok"} 1e+03\n'
    )
    assert requests_in(page % 100) == {"chat": 102.0, "embed": 1000.0}
    pace = Pace()
    assert pace.is_due(0.0)
    assert pace.per_s("chat") is None
    pace.take({"gateway-0": page % 100}, 0.0)
    assert not pace.is_due(14.0)
    assert pace.per_s("chat") is None
    pace.take({"gateway-0": page % 400, "gateway-1": page % 7}, 30.0)
    assert pace.per_s("chat") == 10.0
    assert pace.per_s("embed") == pace.per_s("nobody") == 0.0
    pace.take({}, 45.0)
    pace.take({"gateway-0": page % 298, "gateway-1": page % 7}, 60.0)
    assert pace.per_s("chat") == 10.0
    pace.take({"gateway-0": page % 298}, 1000.0)
    assert pace.per_s("chat") is None


def test_aims_are_ready_replicas_of_both_revisions_and_of_judges() -> None:
    chat = {"name": "chat", "task": "chat", "source": "x", "engine": "synthetic"}
    cluster = Cluster.model_validate(
        {
            "models": [
                {**chat, "rollout": {"judge": "big", "similarity": "embed"}},
                {**chat, "name": "big"},
                {**chat, "name": "embed", "task": "embed"},
            ]
        }
    )
    artifact = Artifact(Path("x"), "x", "synthetic", {})
    plan = make_plan(cluster, dict.fromkeys(("chat", "big", "embed"), artifact), Places(Path()), "1")
    models = {model.routes.name: model for model in plan.models}
    old = models["chat"].routes.revision

    def replica(port: int, revision: str = old, state: ReplicaState = ReplicaState.READY) -> Replica:
        return Replica(f"x-{port}", 1, revision, "127.0.0.1", port, state)

    told = (
        replace(
            models["chat"].routes,
            replicas=(replica(1, state=ReplicaState.WARMING), replica(2), replica(3, "r-new"), replica(4)),
        ),
        replace(models["big"].routes, replicas=(replica(5),)),
        models["embed"].routes,
    )
    rollout = Rollout("chat:1", "chat", old, "r-new", COURSES[Kind.CANARY], 1.0, Phase.COMPARING)
    row = Row(rollout, RULES, Counted(begin(RULES)), Held((0,), (2,)), 1.0, "ann")
    [aim] = aims([row], models, told)
    assert (aim.stable_url, aim.canary_url) == ("http://127.0.0.1:2", "http://127.0.0.1:3")
    assert (aim.judge, aim.similarity) == (ReplicaTarget("http://127.0.0.1:5", "big"), None)
    assert list(aims([replace(row, rollout=replace(rollout, phase=Phase.STARTING))], models, told)) == []
    assert list(aims([row], {}, told)) == list(aims([row], models, told[1:])) == []
    [lonely] = aims([row], models, told[:1])
    assert (lonely.judge, lonely.similarity) == (None, None)
