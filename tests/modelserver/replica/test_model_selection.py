"""Which model of a source a replica serves."""

from pathlib import Path

import pytest
from tests.modelserver.replica.models import double, onnx_file

from forebay.modelserver.replica.choosing import choose_model, is_repository, only_model
from forebay.modelserver.repository import BadModel


def test_explicit_model_name_precedes_same_name_and_only_model(
    tmp_path: Path,
) -> None:
    one = double(tmp_path / "one")
    two = double(double(tmp_path / "two"), "other")

    assert choose_model(one, "mine") == (one, "double")
    assert choose_model(two, "other") == (two, "other")
    assert choose_model(two, "other", "double") == (two, "double")


def test_model_folder_or_bare_file_selects_its_parent_repository(tmp_path: Path) -> None:
    double(tmp_path / "repository")
    bare = tmp_path / "bare"
    bare.mkdir()
    file = onnx_file(bare / "doubles.onnx")

    assert choose_model(tmp_path / "repository" / "double", "mine") == (tmp_path / "repository", "double")
    assert choose_model(file, "mine") == (bare, "doubles")


def test_missing_or_invalid_model_is_rejected_with_a_hint(tmp_path: Path) -> None:
    two = double(double(tmp_path / "two"), "other")
    (two / "broken").mkdir()
    (two / "broken" / "config.pbtxt").write_text("max_batch_size: many")

    for name, wanted, said in (
        ("mine", "", "there is: broken, double, other"),
        ("mine", "none", "model 'none'"),
        ("broken", "", "model 'broken'"),
    ):
        with pytest.raises(BadModel) as found:
            choose_model(two, name, wanted)
        assert said in found.value.text
    (tmp_path / "none").mkdir()
    with pytest.raises(BadModel, match="none holds no model: a repository has a folder for each, such as mine/1/"):
        choose_model(tmp_path / "none", "mine")
    with pytest.raises(BadModel, match="is the model"):
        choose_model(two / "double", "mine", "other")


def test_repository_is_distinguished_from_folders_of_other_engines(tmp_path: Path) -> None:
    repository = double(tmp_path / "repository")
    other = tmp_path / "other"
    other.mkdir()
    onnx_file(other / "model.onnx")
    plan = tmp_path / "model.pt2"
    plan.touch()

    assert [is_repository(each) for each in (repository, repository / "double", plan)] == [True] * 3
    assert [is_repository(each) for each in (other, other / "model.onnx", tmp_path)] == [False] * 3
    assert [only_model(each) for each in (repository, repository / "double", plan)] == ["double", "double", "model"]
    assert only_model(double(repository, "other")) == ""
