"""Consecutive rollouts under load, each with a fault: clients see no error."""

import asyncio
from typing import Final

from tests.e2e.cluster import Cluster
from tests.e2e.faults.grounds import aside, private_urls, routes, run_folder, samples
from tests.e2e.faults.load import Load
from tests.e2e.rollouts import rolling
from tests.e2e.rollouts.rolling import Watch

MOMENTS = ("starting", "comparing", "comparing more", "settling")
"""Where rollouts are when something goes wrong."""
LATE = ("settling", "promoted")
"""What is killed then may be killed when all is over."""
FAULTS = ("kill new", "kill stable", "kill control", "lock the store")
REPLICAS: Final = 2
"""Of the model, all the time; one less where one was killed that serves."""
PATIENCE_S: Final = 240.0


class Rolls:
    """A cluster, the load on it, and the two revisions of a model between which it goes to and fro."""

    def __init__(
        self, cluster: Cluster, load: Load, watch: Watch, both: tuple[str, str], patience_s: float = PATIENCE_S
    ) -> None:
        self.load = load
        self.fewest: list[int] = []
        """Of every rollout: how many replicas were ready, at least."""
        self._cluster = cluster
        self._watch = watch
        self._patience_s = patience_s
        self._before: set[int] = set()
        """Processes of the cluster when the rollout began."""
        [shown] = cluster.status()["models"]
        self._model = str(shown["name"])
        self._stable = str(shown["replicas"][0]["revision"])
        [self._new] = [each for each in both if each != self._stable]

    async def roll(self, moment: str, fault: str, plan: rolling.Plan) -> None:
        """One rollout with its fault."""
        cluster, model, trial = self._cluster, self._model, f"{fault} when {moment}"
        looks = self._watch.looks
        await self.load.until("what was read before has been counted", lambda: self._watch.looks > looks)
        self._watch.fewest = REPLICAS
        self._before = set(await asyncio.to_thread(cluster.pids))
        id = await asyncio.to_thread(rolling.deploy, cluster, model, self._new, plan)
        found = await self._moment(id, moment)
        # whatever ends it before its fault is a finding of its own
        assert found in (*MOMENTS, "promoted"), (trial, rolling.standing(cluster, id))
        late = found in LATE
        await self._fault(fault)
        if fault == "kill new":
            late = late or await self._moment(id, moment) in LATE  # it may have gone on just before
        seen = await asyncio.to_thread(rolling.reached, cluster, id, timeout_s=self._patience_s)
        if seen["phase"] == "promoted":
            assert fault != "kill new" or late, (trial, seen)
            self._stable, self._new = self._new, self._stable
        else:
            assert (fault, seen["phase"]) == ("kill new", "rolled_back"), (trial, seen)
            # the errors of what ran on it may be counted before its end is noticed
            assert "crash" in seen["why"] or "server_error" in seen["why"], (trial, seen)
        await aside("gateways are told", lambda: routes(cluster, model).split is None)
        await rolling.served_by(self.load, self._stable)
        await asyncio.to_thread(rolling.settled, cluster, model, self._stable, REPLICAS)
        assert self.load.bad() == [], trial
        killed = fault == "kill stable" or (fault == "kill new" and seen["phase"] == "promoted")
        assert self._watch.fewest >= REPLICAS - killed, trial
        self.fewest.append(self._watch.fewest)

    async def _moment(self, id: str, moment: str) -> str:
        """Wait for it or for what comes after it, and say which; who only starts is not served meanwhile."""
        load, cluster = self.load, self._cluster
        since = len(load.seen)
        while True:
            before = len(load.seen)
            seen = await asyncio.to_thread(rolling.standing, cluster, id)
            name = "comparing more" if seen["phase"] == "comparing" and seen["step"] else seen["phase"]
            if name == "starting":
                asked = [each for each in load.seen[since:before] if each.asked_at >= since]
                assert [each for each in asked if each.revision != self._stable] == []
            if seen["ended"] or [*MOMENTS].index(name) >= [*MOMENTS].index(moment):
                return name
            await asyncio.sleep(rolling.LOOK_S)

    def _begun(self) -> list[int]:
        """The new revision's workers, without those of the rollout before that are still to end in the same slots."""
        return [pid for pid in rolling.processes(self._cluster, self._model, self._new) if pid not in self._before]

    async def _fault(self, fault: str) -> None:
        cluster = self._cluster
        match fault:
            case "kill new":
                pids = await aside("it has a worker", self._begun)
                rolling.kill_one(pids)
                # a round that had begun before may still let the rollout go on
                await aside("it is noticed", lambda: pids[0] not in self._begun())
            case "kill stable":
                rolling.kill_one(await asyncio.to_thread(rolling.processes, cluster, self._model, self._stable))
            case "kill control":
                await asyncio.to_thread(rolling.kill_control, cluster)
            case _:
                with rolling.locked(cluster.file.with_name("store.db")):
                    await self.load.more(16)


def never_to_the_unready(cluster: Cluster) -> None:
    """No gateway has ever sent a request to a replica that had to say that it is not ready yet."""
    for url in private_urls(run_folder(cluster) / "peers"):
        early = [key for key in samples(url) if key.startswith("forebay_retries_total") and "engine_loading" in key]
        assert early == []
