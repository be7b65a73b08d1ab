"""The replicas used to judge responses: one ready replica of each revision, and of the judging models."""

from collections.abc import Iterable, Iterator, Mapping

from forebay.control.plan import PlannedModel
from forebay.control.quality.client import ReplicaTarget
from forebay.control.quality.quality import Aim
from forebay.core.deploy.rollout import Phase
from forebay.core.model import ModelRoutes, ReplicaState
from forebay.store.rollouts import Row


def aims(rows: Iterable[Row], models: Mapping[str, PlannedModel], told: Iterable[ModelRoutes]) -> Iterator[Aim]:
    """The rollouts being compared; `told`: the routes as known to gateways."""
    routes = {each.name: each for each in told}
    for row in rows:
        rollout = row.rollout
        if rollout.phase is Phase.STARTING or rollout.model not in routes or rollout.model not in models:
            continue
        settings, own = models[rollout.model].rollout, routes[rollout.model]
        yield Aim(
            rollout=rollout,
            settings=settings,
            stable_url=_url(own, rollout.stable),
            canary_url=_url(own, rollout.canary),
            judge=_asked(routes, settings.judge),
            similarity=_asked(routes, settings.similarity),
        )


def _asked(routes: Mapping[str, ModelRoutes], model: str | None) -> ReplicaTarget | None:
    if model is None or model not in routes:
        return None
    url = _url(routes[model], routes[model].revision)
    return ReplicaTarget(url, model) if url else None


def _url(routes: ModelRoutes, revision: str) -> str | None:
    ready = (each for each in routes.replicas if each.revision == revision and each.state is ReplicaState.READY)
    first = next(ready, None)
    return f"http://{first.host}:{first.port}" if first else None
