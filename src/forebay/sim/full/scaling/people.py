"""Somebody who sets the number of replicas by hand, again and again, and in the end to what it was."""

import asyncio
from collections.abc import Callable
from random import Random
from typing import Final

from forebay.control.loop import Controller
from forebay.control.scaling.values import ScaleRefused, ScalingRequest
from forebay.sim.full.book import Book
from forebay.sim.full.clients import MODEL

EVERY_S: Final = (1.0, 5.0)
AUTO: Final = 0.3
"""Chance that it is left to the load for a while."""
LOOK_S: Final = 0.5
ACTOR: Final = "ann"


class Hand:
    """`replicas`: what it was, and will be. At most `most` are set."""

    def __init__(
        self, replicas: int, most: int, rng: Random, book: Book, controller: Callable[[], Controller | None]
    ) -> None:
        self.rests = False
        """Whether the number is to be what it was, from now on."""
        self._replicas = replicas
        self._most = most
        self._rng = rng
        self._book = book
        self._controller = controller

    async def run(self) -> None:
        """Until cancelled."""
        rng = self._rng
        while True:
            if self.rests:
                if not self.done:
                    await self._set(self._replicas)
                await asyncio.sleep(LOOK_S)
            else:
                await asyncio.sleep(rng.uniform(*EVERY_S))
                if not self.rests:
                    await self._set(None if rng.random() < AUTO else rng.randint(1, self._most))

    @property
    def done(self) -> bool:
        """Whether control knows the number that it is to be in the end."""
        controller = self._controller()
        if controller is None or controller.scaler is None:
            return False
        return any(each.setting.replicas == self._replicas for each in controller.scaler.standing(MODEL))

    async def _set(self, replicas: int | None) -> None:
        controller = self._controller()
        if controller is None or controller.scaler is None:
            return
        self._book.note("scale", replicas)
        try:
            await controller.scaler.set(ScalingRequest(MODEL, replicas), ACTOR)
        except ScaleRefused as refused:  # it does not know its models yet
            self._book.note("refused", refused.text)
