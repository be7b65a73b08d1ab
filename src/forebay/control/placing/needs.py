"""The resource needs of a model's replicas: as configured, or estimated where not configured."""

from collections.abc import Callable, Collection, Mapping

from forebay.control.plan import PlannedModel
from forebay.core.model import WorkerSpec
from forebay.core.placement.memory import Footprint
from forebay.core.placement.settings import PlacementSettings
from forebay.core.placement.values import GIB, Need
from forebay.core.reconcile import Slot

Settings = Mapping[str, int | float | str | bool]
Estimate = Callable[[str, str, Settings, int], Footprint]
"""The memory a replica takes, by engine, artifact path, engine settings, and number of GPUs: on each GPU, or with 0
on its node. It may read files, and does not raise."""


class Needs:
    """Caches the estimates: each reads the header of a file."""

    def __init__(self, estimate: Estimate) -> None:
        self._estimate = estimate
        self._made: dict[tuple[object, ...], Footprint] = {}
        self._needs: dict[str, tuple[PlacementSettings, Slot, Need]] = {}

    def of(self, model: PlannedModel, slot: Slot) -> Need:
        """The need of a slot of a model; the same object as long as both are unchanged."""
        known = self._needs.get(slot.id)
        if known is None or known[:2] != (model.placement, slot):
            known = self._needs[slot.id] = model.placement, slot, self._need(model, slot)
        return known[2]

    def keep(self, slots: Collection[str]) -> None:
        """Drop the needs of all other slots."""
        for gone in self._needs.keys() - slots:
            del self._needs[gone]

    def _need(self, model: PlannedModel, slot: Slot) -> Need:
        assert isinstance(slot.spec, WorkerSpec)
        settings = model.placement
        host = self.footprint(slot.spec, 0)
        stated = round(settings.memory_gib * GIB) if settings.memory_gib else 0
        gpus = settings.gpus
        device = self.footprint(slot.spec, gpus) if gpus else Footprint()
        return Need(
            slot=slot.id,
            model=model.routes.name,
            memory_bytes=host.overhead_bytes if gpus else stated or host.total_bytes,
            gpus=gpus,
            device_bytes=stated or device.total_bytes if gpus else 0,
            fraction=settings.fraction or 0.0,
            whole=bool(gpus) and not settings.fraction and not stated,
            fallback_bytes=host.total_bytes,
            cpus=settings.cpus,
            kinds=frozenset(settings.gpu_kinds),
            profile=settings.mig or "",
            nodes=frozenset(settings.nodes),
            labels=frozenset(settings.labels),
            low_priority=settings.low_priority,
            spread=settings.strategy == "spread",
            linked=settings.linked,
        )

    def footprint(self, spec: WorkerSpec, gpus: int) -> Footprint:
        """The estimated memory of such a replica."""
        key = (spec.engine, spec.artifact, gpus, *sorted(spec.settings.items()))
        made = self._made.get(key)
        if made is None:
            made = self._made[key] = self._estimate(spec.engine, spec.artifact, spec.settings, gpus)
        return made
