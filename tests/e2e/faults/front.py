"""Two gateway processes over a handwritten snapshot that routes to every replica through a proxy."""

from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path

from tests.e2e.cluster import Cluster, free_ports
from tests.e2e.faults.grounds import GATEWAYS, routes
from tests.e2e.faults.proxy import Proxy
from tests.gateway.rig import write_snapshot
from tests.gateway.test_process import gateway

from forebay.core.model import ModelRoutes, Policy

QUEUE_TIMEOUT_S = 0.5
"""Shorter than an answer takes: that a replica is lost late must not count as having waited for one."""


@dataclass
class Front:
    """The gateways and the proxies behind them."""

    folder: Path
    routes: ModelRoutes
    """As the cluster has them, past the proxies."""
    port: int = 0
    proxies: list[Proxy] = field(default_factory=list)
    """One for each replica, in their order."""
    _old: list[Proxy] = field(default_factory=list)

    @property
    def peers(self) -> Path:
        """Where the gateways say where they are."""
        return self.folder / "peers"

    @property
    def urls(self) -> list[str]:
        """Of the replicas themselves."""
        return [f"http://{each.host}:{each.port}" for each in self.routes.replicas]

    async def renew(self, at: int) -> Proxy:
        """Another proxy before a replica: for the gateways a replica that they know nothing bad of."""
        proxy = Proxy(*self.proxies[at].worker)
        await proxy.start()
        self._old.append(self.proxies[at])
        self.proxies[at] = proxy
        self.write()
        return proxy

    def write(self) -> None:
        """Write the snapshot."""
        replicas = zip(self.routes.replicas, self.proxies, strict=True)
        seen = tuple(replace(replica, host="127.0.0.1", port=proxy.port) for replica, proxy in replicas)
        write_snapshot(self.folder / "snapshot.json", replace(self.routes, replicas=seen))

    def close(self) -> None:
        """Close all proxies."""
        for proxy in (*self.proxies, *self._old):
            proxy.close()


@asynccontextmanager
async def fronting(cluster: Cluster, model: str, folder: Path, policy: Policy) -> AsyncIterator[Front]:
    """Run gateways of a policy before the replicas of a model of the cluster."""
    front = Front(folder, replace(routes(cluster, model), policy=policy, queue_timeout_s=QUEUE_TIMEOUT_S))
    front.proxies = [Proxy(each.host, each.port) for each in front.routes.replicas]
    (front.port,) = free_ports(1)
    async with AsyncExitStack() as stack:
        stack.callback(front.close)
        for proxy in front.proxies:
            await proxy.start()
        front.write()
        for number in range(GATEWAYS):
            process = await stack.enter_async_context(gateway(folder, f"gateway-{number}", front.port))
            await process.ready()
        yield front
