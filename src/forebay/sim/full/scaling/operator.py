"""An operator who repeatedly sets the number of replicas, and finally restores it."""

import asyncio
from collections.abc import Callable
from random import Random
from typing import Final

from forebay.control.loop import Controller
from forebay.control.scaling.values import ScaleRefused, ScalingRequest
from forebay.sim.full.clients import MODEL
from forebay.sim.full.event_log import EventLog

EVERY_S: Final = (1.0, 5.0)
AUTO: Final = 0.3
"""Probability of leaving it to autoscaling for a while."""
LOOK_S: Final = 0.5
ACTOR: Final = "ann"


class ScalingOperator:
    """`replicas`: the initial and final number. At most `most` are set."""

    def __init__(
        self, replicas: int, most: int, rng: Random, event_log: EventLog, controller: Callable[[], Controller | None]
    ) -> None:
        self.restoring = False
        """Whether to restore the initial number from now on."""
        self._replicas = replicas
        self._most = most
        self._rng = rng
        self._event_log = event_log
        self._controller = controller

    async def run(self) -> None:
        """Run until cancelled."""
        rng = self._rng
        while True:
            if self.restoring:
                if not self.done:
                    await self._set(self._replicas)
                await asyncio.sleep(LOOK_S)
            else:
                await asyncio.sleep(rng.uniform(*EVERY_S))
                if not self.restoring:
                    await self._set(None if rng.random() < AUTO else rng.randint(1, self._most))

    @property
    def done(self) -> bool:
        """Whether control has the final number."""
        controller = self._controller()
        if controller is None or controller.scaler is None:
            return False
        return any(each.setting.replicas == self._replicas for each in controller.scaler.standing(MODEL))

    async def _set(self, replicas: int | None) -> None:
        controller = self._controller()
        if controller is None or controller.scaler is None:
            return
        self._event_log.note("scale", replicas)
        try:
            await controller.scaler.set(ScalingRequest(MODEL, replicas), ACTOR)
        except ScaleRefused as refused:  # control does not know its models yet
            self._event_log.note("refused", refused.text)
