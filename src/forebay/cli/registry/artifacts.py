"""From a model of a cluster file to the files, engine and settings that its replicas run."""

from collections.abc import Callable
from pathlib import Path

from forebay.cli.registry.opening import registry_of
from forebay.cli.settings import UserError
from forebay.control.plan import Artifact
from forebay.core.cluster import Cluster, ModelSettings
from forebay.core.engine_settings import (
    ENGINES_OF,
    EngineSettings,
    LlamaCppSettings,
    ModelServerSettings,
    OnnxSettings,
    OpenVinoSettings,
    SyntheticSettings,
)
from forebay.core.model import Task
from forebay.engines import choose_engine
from forebay.engines.prepare import prepare
from forebay.engines.protocol import EngineBroken
from forebay.modelserver.replica.choosing import choose_model
from forebay.modelserver.repository import BadModel
from forebay.registry.catalogue import Registry
from forebay.registry.digests import artifact_digest, verify
from forebay.registry.proved import RegistryError
from forebay.registry.sources import Progress, RegistrySource, SourceError, fetch, obtain, parse, parse_registered
from forebay.store.database import StoreError

MODEL_SERVER = "modelserver"
"""The engine of models of the task `tensor`."""


def prepare_model(
    model: ModelSettings, home: Path, progress: Progress, registry: Callable[[], Registry] | None = None
) -> Artifact:
    """Fetch, verify and convert the files of a model; `registry` opens the registry if needed. Raises `UserError`."""
    try:
        registered = parse_registered(model.source)
        if registered and registry:
            return _prepare_registered(model, registered, registry(), home, progress)
    except (RegistryError, StoreError, SourceError, EngineBroken, BadModel, OSError) as error:
        raise UserError(f"model {model.name}: {error}") from error
    if isinstance(model.engine, SyntheticSettings):
        settings = {**model.engine.model_dump(), "task": model.task.value}
        return Artifact(Path("synthetic"), "synthetic", model.engine.name, settings)
    if model.task is Task.TENSOR:
        return _prepare_tensor_model(model, home, progress)
    try:
        path = fetch(parse(model.source), home, progress)
        if model.sha256:
            verify(path, model.sha256, home, progress)
        engine = model.engine or default_engine(path)
        if engine.name not in ENGINES_OF[model.task]:
            fitting = " or ".join(ENGINES_OF[model.task])
            raise UserError(
                f"model {model.name}: {path} is for {engine.name}, but `task: {model.task}` needs {fitting}"
            )
        settings = engine.model_dump()
        prepared = prepare(engine.name, path, settings, home / "cache", progress)
        digest = artifact_digest(path, home, progress)
    except (SourceError, EngineBroken, OSError) as error:
        raise UserError(f"model {model.name}: {error}") from error
    return Artifact(prepared.absolute(), digest, engine.name, settings)


def _prepare_tensor_model(model: ModelSettings, home: Path, progress: Progress) -> Artifact:
    """Fetch a repository, and check what can be checked without loading the model. Raises `UserError`."""
    engine = model.engine or ModelServerSettings()
    assert isinstance(engine, ModelServerSettings)  # validated by `core.cluster`
    try:
        path = obtain(parse(model.source), home, progress)
        if model.sha256:
            verify(path, model.sha256, home, progress)
        choose_model(path, model.name, engine.model)
        digest = artifact_digest(path, home, progress)
    except (SourceError, BadModel, OSError) as error:
        raise UserError(f"model {model.name}: {error}") from error
    return Artifact(path.absolute(), digest, MODEL_SERVER, engine.model_dump())


def _prepare_registered(
    model: ModelSettings, source: RegistrySource, registry: Registry, home: Path, progress: Progress
) -> Artifact:
    """A registered revision: engine settings in the cluster file must match its own."""
    listed, path = registry.open(source.model, source.revision, progress)
    revision = listed.revision
    settings = dict(revision.settings)
    if revision.task is not model.task:
        raise RegistryError(f"{revision.name}: is registered for `task: {revision.task}`, not for {model.task}")
    if model.engine and model.engine.model_dump() != settings:
        raise RegistryError(f"{revision.name}: has its own engine and settings; leave out `engine`")
    if model.task is Task.TENSOR:
        choose_model(path, model.name, str(settings.get("model", "")))
        return Artifact(path, revision.artifact, revision.engine, settings)
    prepared = prepare(revision.engine, path, settings, registry.cache(revision, home / "cache"), progress)
    return Artifact(prepared.absolute(), revision.artifact, revision.engine, settings)


def prepare_models(cluster: Cluster, home: Path, progress: Callable[[str], Progress]) -> dict[str, Artifact]:
    """The artifacts of all models, by name. Raises `UserError` with the problems of all of them."""
    artifacts, problems = {}, []
    with registry_of(cluster, home) as registry:
        for model in cluster.models:
            try:
                artifacts[model.name] = prepare_model(model, home, progress(model.name), registry)
            except UserError as error:
                problems.append(str(error))
    if problems:
        raise UserError("\n".join(problems))
    return artifacts


def default_engine(path: Path) -> EngineSettings:
    """The default settings of the engine that fits a file or folder. Raises `EngineBroken`."""
    match choose_engine(path):
        case "openvino":
            return OpenVinoSettings()
        case "llamacpp":
            return LlamaCppSettings()
        case "onnx":
            return OnnxSettings()
        case other:
            raise EngineBroken(f"{path}: engine {other!r} has no default settings; name one with `engine`")
