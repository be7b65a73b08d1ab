"""Applies deployed revisions to a plan: slots for each revision."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

from forebay.control.plan import Artifact, Plan, PlannedModel, slot_of
from forebay.core.deploy.slots import Held, resized
from forebay.core.model import ModelRoutes, ReplicaState
from forebay.core.reconcile import ObservedUnit, Slot
from forebay.store.rollouts import Row, Target


@dataclass(frozen=True, slots=True)
class Deployed:
    """What a model serves: a revision and its slots, and the canary if there is one."""

    stable: str
    held: Held
    canary: str = ""


def deployed(model: PlannedModel, target: Target | None, row: Row | None) -> Deployed:
    """What is to run of a model: by its active rollout, else its target, else its cluster file."""
    if row is not None and not row.ended:
        return Deployed(row.rollout.stable, row.held, row.rollout.canary)
    revision = target.revision if target else model.routes.revision
    return Deployed(revision, Held(base_held(model, target)))


def base_held(model: PlannedModel, target: Target | None) -> tuple[int, ...]:
    """The slots that a model has without a rollout."""
    several = len(model.slots)
    return resized(target.indices if target else range(several), several)


class Shaper:
    """Creates the slots of revisions, and caches them: the digest of a slot costs as much as a whole round."""

    def __init__(self) -> None:
        self._made: dict[tuple[str, str, int], tuple[Slot, Artifact, Slot]] = {}

    def shaped(
        self,
        model: PlannedModel,
        what: Deployed,
        artifacts: Mapping[str, Artifact],
        plan: Plan,
        units: Iterable[ObservedUnit],
    ) -> PlannedModel:
        """The model as deployed. `artifacts` by revision; of a revision that is not prepared, only running units are
        kept."""
        alive = {unit.slot: unit for unit in units if unit.alive}
        own = (*model.slots, *((model.spare,) if model.spare else ()))

        def slots(revision: str, indices: Iterable[int], group: str) -> tuple[Slot, ...]:
            artifact, made = artifacts.get(revision), []
            for index in indices:
                id = f"{model.routes.name}-{index}"
                if revision == model.routes.revision:
                    slot = own[index] if index < len(own) else slot_of(own[0], index, None, plan.version)
                elif artifact is not None:
                    slot = self._slot(own[0], index, artifact, plan.version)
                elif id in alive:
                    slot = replace(own[0], id=id, index=index, digest=alive[id].digest)
                else:
                    continue
                made.append(replace(slot, group=group))
            return tuple(made)

        name = model.routes.name
        stable = slots(what.stable, what.held.stable, name)
        spare = slots(what.stable, (what.held.spare,), name) if model.spare else ()
        canary = slots(what.canary, what.held.canary, f"{name}@{what.canary}")
        routes, engine, source = model.routes, model.engine, model.source
        if what.stable != routes.revision:
            routes = replace(routes, revision=what.stable)
            source = f"registry:{name}@{what.stable}"
            engine = artifacts[what.stable].engine if what.stable in artifacts else engine
        return replace(
            model,
            routes=routes,
            engine=engine,
            source=source,
            slots=stable,
            spare=spare[0] if spare else None,
            canary=canary,
        )

    def _slot(self, base: Slot, index: int, artifact: Artifact, version: str) -> Slot:
        key = (base.id, artifact.digest, index)
        made = self._made.get(key)
        if made is None or made[0] is not base or made[1] is not artifact:
            made = self._made[key] = base, artifact, slot_of(base, index, artifact, version)
        return made[2]


def ready_of(routes: ModelRoutes, revision: str) -> int:
    """How many replicas of that revision gateways may send requests to."""
    return sum(each.revision == revision and each.state is ReplicaState.READY for each in routes.replicas)
