"""The servers of the benchmark: how each is installed, set up and started, and what it is asked.

Every one runs on one core, with one instance of the model on one thread, batches as large as the model's, and what
its own documentation recommends for speed. Forebay and Triton are asked in binary tensors, over HTTP and gRPC, and
in JSON, which is all that the others take.
"""

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Mapping
from importlib import metadata
from pathlib import Path
from typing import Final, NamedTuple

from models import BACKEND, DELAY_US, IN_PROCESS, Model

from forebay.modelserver.process import placement

REPO: Final = Path(__file__).parents[2]
COMPILED: Final = Path(os.environ.get("BENCH_COMPILED") or REPO / "build/compiled")
"""Forebay as `make wheel` builds it: what production runs, as the peers are compiled too."""
VENVS: Final = REPO / "bench/.venvs"
HERE: Final = Path(__file__).parent
PEERS: Final = {
    "litserve": ("litserve==0.2.19", "uvloop", "httptools"),
    "bentoml": ("bentoml==1.4.39", "uvloop", "httptools"),
    "mlserver": ("mlserver==1.7.1",),
}
"""What pip installs for each, beside ONNX Runtime, into a virtual environment of its name."""
RUNTIME: Final = f"onnxruntime=={metadata.version('onnxruntime')}"
PYTHON: Final = "python"
"""The backend of Triton that is measured: its others are not in the package."""
TRITON_RUNTIME: Final = "onnxruntime==1.23.2"
"""The last for Python 3.10, which Triton's stub has."""
ORACLE: Final = Path(os.environ.get("FOREBAY_ORACLE", REPO / ".forebay/oracle")) / "triton"


class Ports(NamedTuple):
    """Where a server is asked. Two that are compared are up at the same time."""

    http: int
    grpc: int
    metrics: int


PORTS: Final = (Ports(17300, 17301, 17302), Ports(17310, 17311, 17312))


class Start(NamedTuple):
    """A command line and what it needs in its environment."""

    command: list[str]
    environ: Mapping[str, str] = {}


class Server(NamedTuple):
    """How a server is started for a model whose folders (`1/model.onnx`, `config.pbtxt`) are there, and asked."""

    start: Callable[[Model, Path, Path, Ports], Start]
    """The model, the repository that has only it, a folder that is not there yet, and where it is to listen."""
    ask: Callable[[Model], bytes]
    """A whole request; of gRPC, the message."""
    grpc: bool = False
    ensembles: bool = False
    """Only for models with steps."""

    def port(self, ports: Ports) -> int:
        """Where it is asked."""
        return ports.grpc if self.grpc else ports.http

    def probe(self, model: Model) -> bytes:
        """A request over HTTP, to see whether it is there."""
        return _binary(model) if self.grpc else self.ask(model)


def _http(path: str, body: bytes, *headers: str) -> bytes:
    head = "".join(f"{line}\r\n" for line in (f"POST {path} HTTP/1.1", "host: 127.0.0.1", *headers))
    return f"{head}content-length: {len(body)}\r\n\r\n".encode() + body


def _binary(model: Model) -> bytes:
    size = {"binary_data_size": len(model.binary)}
    tensor = {"name": model.input, "datatype": "INT64", "shape": [1, len(model.row)], "parameters": size}
    head = json.dumps({"inputs": [tensor], "parameters": {"binary_data_output": True}}).encode()
    length = f"inference-header-content-length: {len(head)}"
    return _http(f"/v2/models/{model.name}/infer", head + model.binary, length)


def _json(model: Model) -> bytes:
    tensor = {"name": model.input, "datatype": "INT64", "shape": [1, len(model.row)], "data": model.row}
    body = json.dumps({"inputs": [tensor]}).encode()
    return _http(f"/v2/models/{model.name}/infer", body, "content-type: application/json")


def _message(model: Model) -> bytes:
    from tritonclient.grpc.service_pb2 import ModelInferRequest

    asked = ModelInferRequest(model_name=model.name, raw_input_contents=[model.binary])
    asked.inputs.add(name=model.input, datatype="INT64", shape=[1, len(model.row)])
    return bytes(asked.SerializeToString())


def _litserve_json(model: Model) -> bytes:
    return _http("/predict", json.dumps({"row": model.row}).encode(), "content-type: application/json")


def _bentoml_json(model: Model) -> bytes:
    return _http("/predict", json.dumps({"rows": [model.row]}).encode(), "content-type: application/json")


# --- how they are started


def _words(ports: Ports) -> list[str]:
    return [word for name, port in ports._asdict().items() for word in (f"--{name}-port", str(port))]


def _forebay_interpreted(_: Model, repository: Path, place: Path, ports: Ports) -> Start:
    """As a plain install runs it: the same source, not compiled."""
    return Start([str(REPO / ".venv/bin/forebay"), "serve", "--repository", str(repository), *_words(ports)])


def _forebay(model: Model, repository: Path, place: Path, ports: Ports) -> Start:
    started = _forebay_interpreted(model, repository, place, ports)
    return started._replace(environ={"PYTHONPATH": str(COMPILED)})


def _forebay_apart(model: Model, repository: Path, place: Path, ports: Ports) -> Start:
    """The steps of its ensemble in processes of their own, as without `forebay.in_process`."""
    shutil.copytree(repository, place)
    whole = place / model.name / "config.pbtxt"
    whole.write_text(whole.read_text().replace(IN_PROCESS, ""))
    return _forebay(model, place, place, ports)


def _triton(model: Model, repository: Path, place: Path, ports: Ports) -> Start:
    """One Python model that runs all files."""
    _python_model(place / model.name, model.config(PYTHON), [repository / name for name in model.folders])
    return _tritonserver(place, ports)


def _triton_apart(model: Model, repository: Path, place: Path, ports: Ports) -> Start:
    """An ensemble whose steps are Python models."""
    for name, config in model.configs.items():
        files = [repository / name] if name in model.folders else []
        _python_model(place / name, config.replace(BACKEND, PYTHON), files)
    return _tritonserver(place, ports)


def _python_model(place: Path, config: str, sources: list[Path]) -> None:
    folder = place / "1"
    folder.mkdir(parents=True)
    (place / "config.pbtxt").write_text(config)
    for number, source in enumerate(sources):
        (folder / f"{number}.onnx").symlink_to(source / "1/model.onnx")
        shutil.copy(HERE / "peers/triton_model.py", folder / "model.py")
        shutil.copy(HERE / "peers/chain.py", folder)


def _tritonserver(repository: Path, ports: Ports) -> Start:
    packages = ORACLE / "lib/python3.10/site-packages"
    python = (ORACLE / "bin/python").resolve().parents[1]
    triton = packages / "pytriton/tritonserver"
    return Start(
        [
            str(triton / "bin/tritonserver"), f"--model-repository={repository}",
            f"--backend-directory={triton}/backends", *_words(ports),
        ],
        {
            "LD_LIBRARY_PATH": f"{packages / 'nvidia_pytriton.libs'}:{python / 'lib'}",
            "PYTHONPATH": f"{VENVS / 'triton'}:{packages}",
        },
    )  # fmt: skip


def _bare_http(model: Model, repository: Path, place: Path, ports: Ports) -> Start:
    """No server of models: the runtime, behind sockets in C."""
    place.mkdir()
    document, data = model.answer
    head = [
        "HTTP/1.1 200 OK",
        "content-type: application/octet-stream",
        f"inference-header-content-length: {len(document)}",
        f"content-length: {len(document) + len(data)}",
    ]
    (place / "head").write_bytes("".join(f"{line}\r\n" for line in [*head, ""]).encode() + document)
    compiler = ["gcc", "-O2", "-shared", "-fPIC", "-o", str(place / "sockets.so"), str(HERE / "sockets.c")]
    subprocess.run(compiler, check=True)
    files = os.pathsep.join(str(repository / name / "1/model.onnx") for name in model.folders)
    words = [place / "sockets.so", ports.http, files, model.input, len(model.row), model.max_batch, place / "head"]
    return Start([sys.executable, str(HERE / "bare_http.py"), *map(str, words)], placement.DEFAULTS)


def _environ(model: Model, repository: Path, ports: Ports) -> dict[str, str]:
    return {
        "BENCH_FILES": os.pathsep.join(str(repository / name / "1/model.onnx") for name in model.folders),
        "BENCH_INPUT": model.input,
        "BENCH_BATCH": str(model.max_batch),
        "BENCH_DELAY_S": str(DELAY_US / 1e6),
        "BENCH_PORT": str(ports.http),
    }


def _copy(place: Path, script: str) -> None:
    for name in (script, "chain.py"):
        shutil.copy(HERE / "peers" / name, place)


def _litserve(model: Model, repository: Path, place: Path, ports: Ports) -> Start:
    script = HERE / "peers/litserve_server.py"
    return Start([str(VENVS / "litserve/bin/python"), str(script)], _environ(model, repository, ports))


def _bentoml(model: Model, repository: Path, place: Path, ports: Ports) -> Start:
    place.mkdir()
    _copy(place, "bentoml_server.py")
    where = ["--working-dir", str(place), "--host", "127.0.0.1", "--port", str(ports.http)]
    home = {"BENTOML_HOME": str(place / "home"), "BENTOML_DO_NOT_TRACK": "True"}
    return Start(
        [str(VENVS / "bentoml/bin/bentoml"), "serve", "bentoml_server:Bench", *where],
        _environ(model, repository, ports) | home,
    )


def _mlserver(model: Model, repository: Path, place: Path, ports: Ports) -> Start:
    place.mkdir()
    _copy(place, "mlserver_runtime.py")
    settings = {f"{name}_port": port for name, port in ports._asdict().items()} | {"host": "127.0.0.1"}
    (place / "settings.json").write_text(json.dumps({**settings, "parallel_workers": 0, "debug": False}))
    batching = {"max_batch_size": model.max_batch, "max_batch_time": DELAY_US / 1e6}
    runtime = {"name": model.name, "implementation": "mlserver_runtime.Runtime", **batching}
    (place / "model-settings.json").write_text(json.dumps(runtime))
    environ = _environ(model, repository, ports) | {"PYTHONPATH": str(place)}
    return Start([str(VENVS / "mlserver/bin/mlserver"), "start", str(place)], environ)


SERVERS: Final[dict[str, Server]] = {
    "bare_http": Server(_bare_http, _binary),
    "forebay": Server(_forebay, _binary),
    "forebay_grpc": Server(_forebay, _message, grpc=True),
    "forebay_json": Server(_forebay, _json),
    "forebay_interpreted": Server(_forebay_interpreted, _binary),
    "forebay_apart": Server(_forebay_apart, _binary, ensembles=True),
    "triton": Server(_triton, _binary),
    "triton_grpc": Server(_triton, _message, grpc=True),
    "triton_json": Server(_triton, _json),
    "triton_apart": Server(_triton_apart, _binary, ensembles=True),
    "litserve": Server(_litserve, _litserve_json),
    "bentoml": Server(_bentoml, _bentoml_json),
    "mlserver": Server(_mlserver, _json),
}


def install(names: list[str]) -> list[str]:
    """Install the peers that are missing, and compile Forebay if its source has changed; returns who is there."""
    if "BENCH_COMPILED" not in os.environ:
        subprocess.run([str(REPO / "scripts/compiled")], check=True)
    missing = set()
    for peer in sorted({name.partition("_")[0] for name in names}):
        try:
            _install(peer)
        except (OSError, subprocess.CalledProcessError) as error:
            print(f"MISSING: {peer} cannot be installed: {error}", flush=True)
            missing.add(peer)
    return [name for name in names if name.partition("_")[0] not in missing]


def _install(peer: str) -> None:
    place = VENVS / peer
    if (peer not in PEERS and peer != "triton") or (place / "installed").exists():
        return
    if peer == "triton":
        subprocess.run([str(REPO / "scripts/oracle")], check=True)
        words = ["install", "-q", "--target", str(place), "--upgrade", TRITON_RUNTIME, "numpy==1.26.4"]
        subprocess.run([str(ORACLE / "bin/python"), "-m", "pip", *words], check=True)
    else:
        subprocess.run([sys.executable, "-m", "venv", str(place)], check=True)
        subprocess.run([str(place / "bin/pip"), "install", "-q", *PEERS[peer], RUNTIME], check=True)
    (place / "installed").touch()


def version(name: str) -> str:
    """The version that was measured; empty: it is of this repository."""
    peer = name.partition("_")[0]
    if peer == "bare":
        return ""
    if peer == "triton":
        return f"2.51.0, {TRITON_RUNTIME}"
    return f"{PEERS[peer][0].partition('==')[2]}, {RUNTIME}" if peer in PEERS else metadata.version("forebay")
