"""`forebay serve` and cluster files with model repositories."""

import sys
from pathlib import Path
from typing import Any

import pytest
from tests.modelserver.replica.models import double, onnx_file

from forebay.cli.build import ENGINE_COMMANDS
from forebay.cli.registry.artifacts import prepare_model
from forebay.cli.serve import ModelOptions, cluster_of
from forebay.cli.settings import WRONG_USAGE, UserError
from forebay.core.cluster import ModelSettings
from forebay.core.engine_settings import ModelServerSettings
from forebay.core.model import Task


def wished(source: Path, task: Task | None = None, name: str | None = None, *more: str) -> ModelSettings:
    cluster = cluster_of(ModelOptions(str(source), name, task, None, 1, None), more, {})
    return cluster.models[0]


def prepared(home: Path, source: Path, **engine: Any) -> Any:
    settings = {"name": "mine", "task": "tensor", "source": str(source), "engine": {"name": "modelserver", **engine}}
    return prepare_model(ModelSettings(**settings), home, lambda *_: None)


def test_repository_is_recognized_and_named_after_its_only_model(tmp_path: Path) -> None:
    repository = double(tmp_path / "all", "My_Model")

    for source in (repository, repository / "My_Model"):
        model = wished(source)
        assert (model.task, model.name) == (Task.TENSOR, "my_model")
        assert model.engine == ModelServerSettings()
    double(repository)
    assert wished(repository, None, "double").name == "double"
    with pytest.raises(UserError) as told:
        wished(repository)
    assert told.value.exit_code == WRONG_USAGE
    assert f"{repository} is a folder of models (My_Model, double)" in str(told.value)
    assert f"forebay serve {repository}/My_Model\n  forebay serve --repository {repository}" in str(told.value)
    assert wished(repository, None, "mine", "engine.model=double").engine == ModelServerSettings(model="double")


@pytest.mark.parametrize(
    ("names", "said"),
    [
        (["b.onnx", "c.onnx"], "forebay serve {0}/b.onnx\n  forebay serve --repository {0}"),
        (["b.pt"], "forebay serve {0}/b.pt\n  forebay serve --repository {0}"),
        (["b.gguf", "c.gguf"], "forebay serve {0}/b.gguf"),
        ([], "no engine is known for this"),
    ],
)
def test_folder_of_model_files_error_suggests_commands(tmp_path: Path, names: list[str], said: str) -> None:
    for name in names:
        (tmp_path / name).touch()
    with pytest.raises(UserError) as told:
        wished(tmp_path)
    assert said.format(tmp_path) in str(told.value)


def test_onnx_file_is_a_tensor_model_only_if_the_task_says_so(tmp_path: Path) -> None:
    file = onnx_file(tmp_path / "doubles.onnx")

    assert wished(file).task is Task.EMBED
    assert (wished(file, Task.TENSOR).task, wished(file, Task.TENSOR).name) == (Task.TENSOR, "doubles")


def test_changed_repository_file_changes_the_digest_and_keeps_settings(tmp_path: Path) -> None:
    repository = double(tmp_path / "all")
    first = prepared(tmp_path, repository)
    (repository / "double" / "labels.txt").write_text("a\n")

    second = prepared(tmp_path, repository, load="all")

    assert first.digest != second.digest
    assert (second.path, second.engine) == (repository, "modelserver")
    assert second.settings == {"name": "modelserver", "model": "", "load": "all", "grpc_port_first": 0}
    assert ENGINE_COMMANDS["modelserver"] == (sys.executable, "-m", "forebay.modelserver")


@pytest.mark.parametrize(
    ("config", "said"),
    [
        ("max_batch_size: 8", "it is not in"),
        ("max_batch_size: many", "model mine: model 'mine'"),
        (None, "no such file or folder"),
    ],
)
def test_repository_problems_are_reported_before_anything_starts(
    config: str | None, said: str, tmp_path: Path
) -> None:
    repository = tmp_path / "none"
    if config is not None:
        repository = double(double(tmp_path / "all"), "mine" if "many" in config else "other")
        for each in repository.iterdir():
            (each / "config.pbtxt").write_text(config)
    with pytest.raises(UserError) as found:
        prepared(tmp_path, repository)

    assert said in str(found.value)
