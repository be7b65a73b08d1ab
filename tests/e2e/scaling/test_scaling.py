"""The demo's chat model has as many replicas as its load needs: more, fewer, none at all; and no request fails."""

import asyncio
import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tests.e2e.cluster import CHAT, Cluster, launch, wait_for
from tests.e2e.faults.grounds import STORIES, aside
from tests.e2e.faults.load import Load, Patient, loading
from tests.e2e.rollouts.revisions import forebay, write_cluster

TEXTS: dict[int, str | None] = dict.fromkeys(range(STORIES))
GATEWAYS = 1
MANY, FEW = 16, 1
START_S = 120.0
"""For replicas to come, or to go, on a machine that is busy."""
SLO = {"ttft_p99_ms": 60_000, "tpot_p99_ms": 10_000}
"""Kept on any machine."""
FOUR_EACH = {"policy": "apa", "signal": "concurrency", "target": 4}
"""Knows at once that load has come or gone, without having learned how fast this machine is."""
GONE_S = 2.0
QUICK = {"window_s": GONE_S}


@contextmanager
def scaled(folder: Path, name: str, **scale: Any) -> Iterator[Cluster]:
    """The demo's chat model, whose history begins now."""
    path = folder / f"{name}.yaml"
    ports = write_cluster(path, name, [{**CHAT, "replicas": 1, "slo": SLO, "scale": scale}])
    cluster = launch(path, name, ports)
    try:
        cluster.wait_ready()
        yield cluster
    finally:
        cluster.stop()


def seen_by_nobody(load: Load) -> None:
    """Every answer is whole, and there were some."""
    assert load.bad() == []
    assert load.seen


def test_replicas_come_with_the_load_and_go_with_it(tmp_path: Path) -> None:
    async def ramp() -> None:
        port = cluster.gateway_port
        async with loading(port, "chat", TEXTS, Patient, streams=MANY, whole=0) as load:
            await aside("more replicas", lambda: len(cluster.ready_replicas("chat")) > 1, START_S)
            await load.until("they all serve", lambda: len(load.last()) > 1, START_S)
        seen_by_nobody(load)
        async with loading(port, "chat", TEXTS, Patient, streams=FEW, whole=0) as load:
            await aside("one is enough", lambda: len(cluster.replicas("chat")) == 1, START_S)
            await load.more(2)
        seen_by_nobody(load)

    with scaled(tmp_path, "e2e-ramp", min=1, max=3, down=QUICK, **FOUR_EACH) as cluster:
        asyncio.run(ramp())
        said = forebay(cluster.file, "history", "model/chat", "--json")
        sizes = [
            each["why"].partition(" replicas")[0] for each in json.loads(said) if each["kind"] == "scale.changed"
        ]
        assert sizes[0].startswith("1 → "), sizes
        assert sizes[-1].endswith(" → 1"), sizes


def asleep(cluster: Cluster) -> bool:
    """No replica of the model is left, and no process of one."""
    return not cluster.replicas("chat") and len(cluster.pids()) == GATEWAYS


def test_a_model_that_nobody_asks_has_no_replica_and_who_asks_it_then_is_answered(tmp_path: Path) -> None:
    async def wake() -> None:
        async with loading(cluster.gateway_port, "chat", TEXTS, Patient, streams=2, whole=1) as load:
            await load.more(6)
        seen_by_nobody(load)

    with scaled(tmp_path, "e2e-zero", min=0, max=2, to_zero_after_s=GONE_S, down=QUICK) as cluster:
        for _ in range(2):
            wait_for("nobody is left", lambda: asleep(cluster), START_S)
            asyncio.run(wake())
