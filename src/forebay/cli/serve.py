"""`forebay serve MODEL_SOURCE`: builds the cluster file of a single model from the command line."""

import json
import re
import shlex
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path, PurePath

from forebay.cli.settings import WRONG_USAGE, FileText, UserError, parse_cluster, set_overrides, variable_overrides
from forebay.core.cluster import Cluster
from forebay.core.model import Task
from forebay.engines import TASKS, choose_engine
from forebay.engines.protocol import EngineBroken
from forebay.modelserver.replica.choosing import is_repository, only_model
from forebay.modelserver.repository import BadModel, scan
from forebay.registry.sources import REGISTRY, REMOTE, SourceError, expanded

SHOWN_MAX = 8
"""Maximum number of model names in a message."""

ELSEWHERE = ("package:", REGISTRY, *REMOTE)
"""Prefixes of sources that are not local paths."""


@dataclass(frozen=True, slots=True)
class ModelOptions:
    """The model options of the command line; None: not given."""

    source: str
    name: str | None
    task: Task | None
    engine: str | None
    replicas: int
    port: int | None


def model_name(source: str) -> str:
    """A model name derived from a source: `…/SmolLM2-135M-Instruct.Q4_1.gguf` → `smollm2-135m-instruct`."""
    last = PurePath(source.partition(":")[2] if source.startswith(ELSEWHERE) else source).name
    stem = re.sub(r"\.(gguf|onnx|xml|pt2?|tflite)$", "", last, flags=re.IGNORECASE)
    stem = re.sub(r"[.-](i?q\d\w*|f16|f32|bf16|int[48])$", "", stem, flags=re.IGNORECASE)
    name = re.sub(r"[^a-z0-9._-]+", "-", stem.lower()).strip("._-")[:63].strip("._-")
    return name or "model"


def guess_engine(source: str) -> str:
    """The engine that fits a source. Raises `UserError` with what to do."""
    if source.startswith(ELSEWHERE):
        path = source.rpartition("/")[2] if "/" in source else ""
        suffix = PurePath(path).suffix.lower()
        if suffix in (".gguf", ".onnx"):
            return {".gguf": "openvino", ".onnx": "onnx"}[suffix]
        raise UserError(
            f"{source}: the task cannot be derived from the name. Add --task chat or --task embed.", WRONG_USAGE
        )
    try:
        return choose_engine(Path(source))
    except EngineBroken as error:
        raise UserError(str(error)) from error


def _local(source: str) -> Path:
    """The absolute path. For an OpenVINO IR it is the folder, whichever of its files was given."""
    try:
        path = expanded(source).absolute()
    except SourceError as error:
        raise UserError(f"{error}.") from None
    if not path.exists():
        raise UserError(f"{path}: no such file or folder. A model in a package is written package:DIST/PATH.")
    return path.parent if path.name == "openvino_model.xml" else path


def _refuse_several(source: Path, name: str, assignments: Iterable[str]) -> None:
    """Raises `UserError` for a folder of several models without a choice, and suggests commands."""
    chosen = any(each.partition("=")[0] in ("engine.model", "models[0].engine.model") for each in assignments)
    if chosen or not source.is_dir() or not (is_repository(source) or _engine(source) is None):
        return
    try:
        found = scan(source)
    except (BadModel, OSError):  # a single model, or an error that loading it will report
        return
    several = len(found) > 1 or any(each.bare for each in found)
    if not several or any(each.name == name for each in found):
        return
    names = ", ".join(each.bare or each.name for each in found[:SHOWN_MAX])
    more = f" and {len(found) - SHOWN_MAX} more" if len(found) > SHOWN_MAX else ""
    place = shlex.quote(str(source))
    lines = [f"{source} is a folder of models ({names}{more}), and SOURCE is one model. Choose one, or serve all:"]
    one = next((each for each in found if not each.problems), found[0])
    lines.append(f"  forebay serve {shlex.quote(str(source / (one.bare or one.name)))}")
    if not all(each.problems for each in found):
        lines.append(f"  forebay serve --repository {place}")
    raise UserError("\n".join(lines), WRONG_USAGE)


def _engine(source: Path) -> str | None:
    try:
        return choose_engine(source)
    except EngineBroken:
        return None


def _task(source: str, engine: str | None, *, local: bool) -> Task:
    """The default task of a model."""
    if engine == "modelserver" or (engine is None and local and is_repository(Path(source))):
        return Task.TENSOR
    return TASKS.get(engine or guess_engine(source), Task.CHAT)


def cluster_of(
    options: ModelOptions, assignments: Iterable[str], environ: Mapping[str, str], command: str = "forebay serve"
) -> Cluster:
    """The cluster that serves one model. Raises `UserError` in the name of a command."""
    local = not options.source.startswith(ELSEWHERE) and options.engine != "synthetic"
    source = str(_local(options.source)) if local else options.source
    assignments = tuple(assignments)
    if local and options.engine in (None, "modelserver"):
        _refuse_several(Path(source), options.name or model_name(source), assignments)
    task = options.task or _task(source, options.engine, local=local)
    only = only_model(Path(source)) if task is Task.TENSOR and local else ""
    name = options.name or model_name(only or source)
    model: dict[str, object] = {
        "name": name,
        "task": task.value,
        "source": source,
        "replicas": options.replicas,
    }
    if options.engine or task is Task.TENSOR:
        model["engine"] = {"name": options.engine or "modelserver"}
    document: dict[str, object] = {"name": f"serve-{name}"[:63].strip("._-"), "models": [model]}
    if options.port is not None:
        document |= {"gateway": {"port": options.port}, "admin": {"port": options.port + 1}}
    # JSON is valid YAML: one parser, one set of messages.
    text = FileText(command, json.dumps(document).encode())
    overrides = variable_overrides(environ)
    for path, value in set_overrides(assignments).items():
        known = path.partition(".")[0].partition("[")[0] in Cluster.model_fields
        overrides[path if known else f"models[0].{path}"] = value
    return parse_cluster(text, overrides, to_run=True)
