"""Registry revisions for rollout tests: good ones, and ones that are bad in realistic ways."""

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import yaml
from tests.e2e.cluster import CHAT, TEST_HOME, Cluster, launch, write_file

from forebay.engines.prepare import prepare
from forebay.registry.sources import fetch, parse

QUESTION = b"message['content']"
"""How the demo model's chat template puts in what was said."""
UNANSWERED = b"message['role']   "
"""As long, and nobody hears the question."""
UNKNOWN = b"message['cantent']"
"""As long, and every conversation is refused."""
COARSE = 64
"""Of the 256 values of a weight only multiples of this are left."""


def forebay(path: Path, *words: str, wrong: bool = False) -> str:
    """What a command says that is given a cluster file; of one that is to fail, its complaint."""
    done = subprocess.run(
        [sys.executable, "-m", "forebay.cli.main", *words, "-f", str(path)],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
        env={**os.environ, "FOREBAY_HOME": str(TEST_HOME), "NO_COLOR": "1", "COLUMNS": "200"},
    )
    assert bool(done.returncode) is wrong, done.stdout + done.stderr
    return done.stderr if wrong else done.stdout


def write_cluster(
    path: Path, name: str, models: list[dict[str, Any]], store: str = "", **gateway: Any
) -> tuple[int, int]:
    """A cluster file with a registry and a store of its own; the ports of gateway and admin API."""
    ports = write_file(path, name, models, **gateway)
    folder = path.parent
    document = yaml.safe_load(path.read_text()) | {
        "store": store or f"sqlite:///{folder}/store.db",
        "registry": {"folder": str(folder / "registry"), "key_file": str(folder / "registry.key")},
    }
    path.write_text(yaml.safe_dump(document))
    return ports


@contextmanager
def serving(
    folder: Path, name: str, model: dict[str, Any], first: Callable[[Path], str], store: str = "", **gateway: Any
) -> Iterator[Cluster]:
    """A ready cluster with one model that serves the revision which `first` registers."""
    path = folder / f"{name}.yaml"
    source = f"registry:{model['name']}@first"
    ports = write_cluster(path, name, [{**model, "source": source}], store, **gateway)
    alias(path, f"{model['name']}@{first(path)}", "first")
    cluster = launch(path, name, ports)
    try:
        cluster.wait_ready()
        yield cluster
    finally:
        cluster.stop()


def register(path: Path, model: str, source: str | Path, engine: str, *, task: str = "chat", **settings: Any) -> str:
    """Register a revision; its id."""
    options = [word for key, value in settings.items() for word in ("--set", f"engine.{key}={value}")]
    words = ("registry", "add", model, str(source), "--task", task, "--engine", engine, *options, "--json")
    return str(json.loads(forebay(path, *words))["revision"]["id"])


def alias(path: Path, name: str, alias: str) -> None:
    """Let a name lead to a revision."""
    forebay(path, "registry", "alias", name, alias)


def words(path: Path, model: str, **settings: Any) -> str:
    """A revision of the synthetic engine, for which any file will do."""
    source = path.with_name("words")
    source.write_text("none")
    return register(path, model, source, "synthetic", **settings)


def demo_gguf() -> Path:
    """The demo's chat model, with weights of eight bits."""
    path = fetch(parse(str(CHAT["source"])), TEST_HOME, lambda *_: None)
    return prepare("openvino", path, {}, TEST_HOME / "cache", lambda *_: None)


def with_template(source: Path, target: Path, instead: bytes) -> Path:
    """A copy of the demo's chat model, whose chat template has something else where the question belongs."""
    assert len(instead) == len(QUESTION)
    shutil.copyfile(source, target)
    with target.open("r+b") as file:
        head = file.read(8 * 1024 * 1024)
        place = head.index(QUESTION)
        assert head.count(QUESTION) == 1
        file.seek(place)
        file.write(instead)
    return target


def with_ruined_weights(source: Path, target: Path) -> Path:
    """A copy of the demo's chat model, with weights of two bits."""
    shutil.copyfile(source, target)
    for tensor in gguf.GGUFReader(target, "r+").tensors:
        if tensor.tensor_type is gguf.GGMLQuantizationType.Q8_0 and tensor.name.startswith("blk."):
            weights = tensor.data.reshape(-1, 34).view(np.int8)[:, 2:]  # after two bytes of scale
            weights[:] = np.clip((weights.astype(np.int16) + COARSE // 2) // COARSE * COARSE, -128, 127)
    return target
