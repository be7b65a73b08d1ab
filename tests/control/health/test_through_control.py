"""Health in control's rounds: replicas hit by an error are replaced, and slow ones published with a weight."""

import asyncio
from dataclasses import replace
from pathlib import Path

import pytest
from tests.control.health.test_health import FINE, Rig
from tests.control.rig import controlled, plan
from tests.control.units import kill_all, replica

from forebay.core.health import Throttle
from forebay.core.model import WorkerSpec
from forebay.core.reconcile import Slot


def on(slot: Slot, device: str) -> Slot:
    assert isinstance(slot.spec, WorkerSpec)
    return replace(slot, spec=replace(slot.spec, devices=(device,)))


@pytest.mark.slow
def test_control_replaces_condemned_replicas_and_publishes_weights(tmp_path: Path) -> None:
    async def test() -> None:
        rig = Rig()
        slow = replace(FINE, device="gpu-1", throttles=(Throttle.HEAT,), clock_mhz=600.0, clock_max_mhz=1000.0)
        rig.source.now = (FINE, slow)
        slots = (on(replica("chat-0"), "gpu-0"), on(replica("chat-1"), "gpu-1"))
        async with asyncio.timeout(20), controlled(tmp_path, plan(tmp_path, *slots)) as control:
            control.control.health = rig.health()

            def weights() -> dict[str, float]:
                return {r.id: r.weight for model in control.snapshot().models for r in model.replicas}

            await control.until(
                lambda: len(control.events("chat-0")) > 1 and weights() == {"chat-0": 1, "chat-1": 0.6}
            )
            rig.source.hurt(94)
            await control.until(lambda: control.replica("chat-0").generation == 2)
            assert control.replica("chat-1").generation == 1
            assert any("XID 94" in event.why for event in control.events("chat-0"))

    try:
        asyncio.run(test())
    finally:
        kill_all(tmp_path)
