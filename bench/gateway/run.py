"""Gateway CPU per request and per relayed event, beside smg, nginx and LiteLLM in one run.

    python bench/gateway/run.py [--rounds 3] [--window 4] [--only forebay,nginx]

The proxy under test (its whole process tree) is pinned to core 0; a model server and a load generator in C share
core 1. The figure is CPU time by the kernel's own account (`/proc/PID/task/*/schedstat`) over a counted window,
divided by what was completed in it: other load on the machine delays a proxy but hardly changes that quotient.
Events come at a fixed rate: where 64,000/s nearly fill a core, no cost above 15.6 us can show, so a second load
offers 102,400/s, which all may fail to deliver. `per_s` and `events_per_read` (above 1: events were glued together,
which makes them cheaper) belong to every figure. Proxies run one after the other in every round; medians over the
rounds are written to results.json with ratios.
Peers are installed by name: nginx by apt-get, the others into bench/.venvs.
"""

import argparse
import contextlib
import json
import os
import platform
import shutil
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

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

HERE = Path(__file__).parent
VENVS = HERE.parent / ".venvs"
PEERS = {"smg": "smg==1.13.0", "litellm": "litellm[proxy]==1.106.2"}
REPLICAS = 4
MOCK_PORT = 17100
PROXY_PORT = 17200
KEY, RECORD = mint("bench", bytes(ENTROPY_BYTES), now=0.0)
"""Sent to every proxy; only Forebay with everything on asks for it."""


@dataclass(frozen=True)
class Scenario:
    """One load. Unary: requests are counted; stream: events."""

    name: str
    connections: int
    kind: str
    body_bytes: int
    events: int = 0
    interval_us: int = 0


SCENARIOS = (
    Scenario("request_1k", 64, "unary", 1024),
    Scenario("request_32k", 64, "unary", 32_768),
    Scenario("event_64x1ms", 64, "stream", 1024, 500, 1000),
    Scenario("event_512x5ms", 512, "stream", 1024, 100, 5000),
)
GENTLE = (
    Scenario("request_1k", 16, "unary", 1024),
    Scenario("event_64x1ms", 16, "stream", 1024, 100, 20_000),
)
"""LiteLLM cannot sustain the others; its CPU per unit is measured where it can."""


def nginx(folder: Path) -> list[str]:
    """nginx as a keep-alive round-robin proxy, unbuffered."""
    servers = "".join(f"server 127.0.0.1:{MOCK_PORT + i};" for i in range(REPLICAS))
    (folder / "nginx.conf").write_text(f"""
daemon off; worker_processes 1; pid {folder}/nginx.pid; error_log {folder}/error.log;
events {{ worker_connections 4096; }}
http {{
  access_log {folder}/access.log;
  client_body_temp_path {folder}/b; proxy_temp_path {folder}/p; fastcgi_temp_path {folder}/f;
  uwsgi_temp_path {folder}/u; scgi_temp_path {folder}/s; client_body_buffer_size 128k; keepalive_requests 1000000;
  upstream mocks {{ {servers} keepalive 128; keepalive_requests 1000000; }}
  server {{
    listen 127.0.0.1:{PROXY_PORT};
    location / {{
      proxy_pass http://mocks; proxy_http_version 1.1; proxy_set_header Connection ""; proxy_buffering off;
    }}
  }}
}}""")
    return [
        shutil.which("nginx") or "/usr/sbin/nginx",
        "-c",
        str(folder / "nginx.conf"),
        "-e",
        str(folder / "error.log"),
    ]


def smg(folder: Path) -> list[str]:
    """smg, round robin, its metrics listener on loopback."""
    urls = [f"http://127.0.0.1:{MOCK_PORT + i}" for i in range(REPLICAS)]
    return [
        str(VENVS / "smg/bin/smg"), "launch", "--host", "127.0.0.1", "--port", str(PROXY_PORT),
        "--prometheus-host", "127.0.0.1", "--prometheus-port", str(PROXY_PORT + 1),
        "--policy", "round_robin", "--log-level", "warn", "--worker-urls", *urls,
    ]  # fmt: skip


def litellm(folder: Path) -> list[str]:
    """LiteLLM proxy, simple shuffle over the four replicas, one worker, no database."""
    models = [
        {
            "model_name": "mock",
            "litellm_params": {
                "model": "openai/mock",
                "api_base": f"http://127.0.0.1:{MOCK_PORT + i}/v1",
                "api_key": "none",
                "input_cost_per_token": 1e-6,
                "output_cost_per_token": 1e-6,
            },
        }
        for i in range(REPLICAS)
    ]
    open_access = {"dangerously_permit_weak_or_unset_master_key": True}  # without it, it refuses to start keyless
    (folder / "litellm.yaml").write_text(json.dumps({"model_list": models, "general_settings": open_access}))
    return [
        str(VENVS / "litellm/bin/litellm"), "--config", str(folder / "litellm.yaml"),
        "--host", "127.0.0.1", "--port", str(PROXY_PORT), "--num_workers", "1", "--telemetry", "False",
    ]  # fmt: skip


def forebay(folder: Path) -> list[str]:
    """One Forebay gateway process with everything on: keys and limits, routing by price, decisions, audit, ledger."""
    change_keys(folder / "keys.json", lambda _: ((RECORD,), None))
    limits = Quota(requests_per_min=1 << 40, tokens_per_min=1 << 50, streams_max=1 << 20, tokens_per_day=1 << 60)
    paths = (str(folder / "keys.json"), str(folder / "counts.json"), str(folder / "leases.json"))
    tenancy = TenancySpec((Tenant("bench", limits=limits),), *paths)
    return _forebay(folder, Policy.CPR, RecordsSpec(str(folder / "records")), tenancy)


def forebay_lean(folder: Path) -> list[str]:
    """The same without keys and records, counting requests: what the peers are set up to do."""
    return _forebay(folder, Policy.LEAST_REQUESTS, None, None)


def _forebay(folder: Path, policy: Policy, records: RecordsSpec | None, tenancy: TenancySpec | None) -> list[str]:
    replicas = tuple(
        Replica(f"mock-{i}", 1, "r-0", "127.0.0.1", MOCK_PORT + i, ReplicaState.READY) for i in range(REPLICAS)
    )
    routes = ModelRoutes("mock", Task.CHAT, policy, "r-0", 1024, 60.0, replicas)
    (folder / "snapshot.json").write_bytes(msgspec.json.encode(Snapshot(1, (routes,))))
    (folder / "gateways").mkdir()
    spec = GatewaySpec(
        "gateway-0", 1, "127.0.0.1", PROXY_PORT, str(folder / "snapshot.json"), str(folder / "endpoint.json"),
        str(folder / "gateways"), records=records, tenancy=tenancy,
    )  # fmt: skip
    (folder / "spec.json").write_bytes(msgspec.json.encode(spec))
    return [sys.executable, "-m", "forebay.gateway", str(folder / "spec.json")]


PROXIES: dict[str, Callable[[Path], list[str]]] = {
    "forebay": forebay, "forebay_lean": forebay_lean, "smg": smg, "nginx": nginx, "litellm": litellm
}  # fmt: skip


def tree(pid: int) -> list[int]:
    """A process and all its descendants."""
    children: dict[int, list[int]] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with contextlib.suppress(OSError):
                parent = int((entry / "stat").read_text().rsplit(")", 1)[1].split()[1])
                children.setdefault(parent, []).append(int(entry.name))
    found = [pid]
    for each in found:
        found += children.get(each, [])
    return found


def cpu_ns(pid: int) -> int:
    """CPU time of a process tree so far, nanoseconds."""
    total = 0
    for each in tree(pid):
        for task in Path(f"/proc/{each}/task").glob("*/schedstat"):
            with contextlib.suppress(OSError):
                total += int(task.read_text().split()[0])
    return total


@contextlib.contextmanager
def started(command: list[str], core: int, log: Path) -> Iterator[subprocess.Popen[bytes]]:
    """A process in its own session on one core, ahead of other sessions' work; killed with its tree."""
    with log.open("wb") as sink:
        process = subprocess.Popen(
            ["taskset", "-c", str(core), *command], stdout=sink, stderr=subprocess.STDOUT, start_new_session=True
        )
    with contextlib.suppress(OSError):
        Path(f"/proc/{process.pid}/autogroup").write_text("-15")
    try:
        yield process
    finally:
        for pid in tree(process.pid):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        process.wait()


def await_answer(port: int, process: subprocess.Popen[bytes], log: Path) -> None:
    """Wait until the proxy really relays a request."""
    body = b'{"model":"mock","messages":[{"role":"user","content":"hi"}],"max_tokens":1}'
    request = (
        b"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\nconnection: close\r\n"
        b"authorization: Bearer %s\r\ncontent-length: %d\r\n\r\n%s" % (KEY.encode(), len(body), body)
    )
    deadline = time.monotonic() + 120
    while time.monotonic() < deadline and process.poll() is None:
        with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), timeout=5) as connection:
            connection.sendall(request)
            if connection.recv(64).startswith(b"HTTP/1.1 200"):
                return
        time.sleep(0.2)
    raise SystemExit(f"proxy never answered; its log:\n{log.read_text(errors='replace')[-3000:]}")


def measure(load: str, scenario: Scenario, port: int, pid: int, window_s: float) -> dict[str, float]:
    """Run one scenario; CPU of the proxy per request or event, microseconds."""
    command = [
        "taskset", "-c", "1", load, str(port), str(scenario.connections), scenario.kind, str(scenario.body_bytes),
        str(scenario.events), str(scenario.interval_us), "1.5", str(window_s),
    ]  # fmt: skip
    environ = {**os.environ, "BENCH_KEY": KEY}
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, text=True, start_new_session=True, env=environ
    ) as generator:
        with contextlib.suppress(OSError):
            Path(f"/proc/{generator.pid}/autogroup").write_text("-15")
        assert generator.stdout is not None
        if generator.stdout.readline() != "window\n":
            raise SystemExit(f"the load generator failed in {scenario.name}")
        before = cpu_ns(pid)
        seen = json.loads(generator.stdout.readline())
        spent = cpu_ns(pid) - before
    units = seen["events"] if scenario.kind == "stream" else seen["requests"]
    return {
        "cpu_us": spent / 1000 / max(1, units),
        "per_s": units / seen["seconds"],
        "errors": seen["errors"],
        "events_per_read": seen["events"] / max(1, seen["reads"]),
        "p99_us": seen["p99_us"],
    }


def install(names: list[str]) -> None:
    """Install the peers that are missing."""
    if "nginx" in names and not shutil.which("nginx"):
        subprocess.run(["apt-get", "install", "-y", "-q", "nginx-light"], check=True)
    for name in names:
        if name in PEERS and not (VENVS / name / "bin" / name).exists():
            subprocess.run([sys.executable, "-m", "venv", str(VENVS / name)], check=True)
            subprocess.run([str(VENVS / name / "bin/pip"), "install", "-q", PEERS[name]], check=True)


def version(name: str) -> str:
    """The version that was measured."""
    if name == "nginx":
        told = subprocess.run([shutil.which("nginx") or "/usr/sbin/nginx", "-v"], capture_output=True, text=True)
        return told.stderr.strip().rsplit("/", 1)[-1]
    if name in PEERS:
        python = VENVS / name / "bin/python"
        code = f"from importlib.metadata import version; print(version({name!r}))"
        return subprocess.run([python, "-c", code], capture_output=True, text=True, check=True).stdout.strip()
    return metadata.version("forebay")


def one_round(
    names: list[str], folder: Path, mock: str, load: str, window_s: float
) -> Iterator[tuple[str, str, dict[str, float]]]:
    """Every proxy once, in turn; yields (proxy, scenario, figures)."""
    for name in names:
        place = Path(tempfile.mkdtemp(dir=folder))
        with (
            started([mock, str(MOCK_PORT), str(REPLICAS)], 1, place / "mock.log"),
            started(PROXIES[name](place), 0, place / "proxy.log") as proxy,
        ):
            await_answer(PROXY_PORT, proxy, place / "proxy.log")
            for scenario in GENTLE if name == "litellm" else SCENARIOS:
                yield name, scenario.name, measure(load, scenario, PROXY_PORT, proxy.pid, window_s)


def _medians(runs: list[dict[str, float]]) -> dict[str, float]:
    costs = [run["cpu_us"] for run in runs]
    medians = {key: round(statistics.median(run[key] for run in runs), 2) for key in runs[0]}
    return medians | {"cpu_us_min": round(min(costs), 2), "cpu_us_max": round(max(costs), 2)}


def summarise(seen: dict[str, dict[str, list[dict[str, float]]]]) -> dict[str, object]:
    """Medians, their spread, and the ratios that are claimed."""
    figures = {
        name: {scenario: _medians(runs) for scenario, runs in scenarios.items()} for name, scenarios in seen.items()
    }
    ratios = {
        f"{ours}/{name}": {
            scenario: round(figures[ours][scenario]["cpu_us"] / values["cpu_us"], 3)
            for scenario, values in scenarios.items()
        }
        for ours in ("forebay", "forebay_lean")
        for name, scenarios in figures.items()
        if ours in figures and not name.startswith("forebay")
    }
    return {"figures": figures, "ratios": ratios}


def main() -> None:
    """Parse arguments, run the rounds, write results.json."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--window", type=float, default=4.0, help="counted seconds of each scenario")
    parser.add_argument("--only", default=",".join(PROXIES))
    parser.add_argument("--output", type=Path, default=HERE / "results.json")
    options = parser.parse_args()
    names = options.only.split(",")
    install(names)
    seen: dict[str, dict[str, list[dict[str, float]]]] = {}
    with tempfile.TemporaryDirectory() as folder:
        for tool in ("mock", "load"):
            subprocess.run(["gcc", "-O2", "-o", f"{folder}/{tool}", str(HERE / f"{tool}.c")], check=True)
        for number in range(options.rounds):
            for name, scenario, run in one_round(
                names, Path(folder), f"{folder}/mock", f"{folder}/load", options.window
            ):
                seen.setdefault(name, {}).setdefault(scenario, []).append(run)
                print(
                    f"round {number + 1} {name:8} {scenario:13} {run['cpu_us']:8.1f} us  {run['per_s']:9.0f}/s  "
                    f"{run['errors']:.0f} errors  {run['events_per_read']:.2f} events/read",
                    flush=True,
                )
    result = {
        "machine": {"cpus": os.cpu_count(), "kernel": platform.release(), "python": platform.python_version()},
        "versions": {name: version(name) for name in names},
        "rounds": options.rounds,
        **summarise(seen),
    }
    options.output.write_text(json.dumps(result, indent=1) + "\n")
    print(json.dumps(result["ratios"], indent=1))


if __name__ == "__main__":
    main()
