"""What counts as a model in a repository, and that nothing outside it is reached."""

import os
import shutil
from pathlib import Path

import pytest
from tests.modelserver.repository.models import model

from forebay.modelserver.repository import BadModel, Found, read, scan
from forebay.modelserver.repository.finding import DEPTH_MAX


def found(*folders: Path) -> dict[str, Found]:
    return {each.name: each for each in scan(*folders)}


def test_folders_are_models_and_canonical_numbers_are_versions(tmp_path: Path) -> None:
    model(tmp_path, "", "1/model.py", "10/model.py", "2/x", "0/x", "007/x", "v3/x", "-4/x", "5", "warmup/x", name="b")
    model(tmp_path, None, "README.md", name="a")
    (tmp_path / "client.py").touch()
    (tmp_path / ".git").mkdir()

    models = found(tmp_path)

    assert list(models) == ["a", "b"]
    assert dict(models["b"].versions) == {n: tmp_path / f"b/{n}" for n in (0, 1, 2, 10)}
    assert list(models["b"].versions) == [0, 1, 2, 10]
    assert models["b"].warnings == ("the folder 007 is not a version: zeros before the number",)
    assert models["a"] == Found("a", tmp_path / "a", stamp=models["a"].stamp, roots=(tmp_path,))
    assert not models["b"].problems


def test_version_numbers_are_limited_to_int64(tmp_path: Path) -> None:
    model(
        tmp_path, "", f"{2**63 - 1}/model.py", "1000000000000000000/x", f"{2**63}/x", f"{10**19}/x", "²/x", name="b"
    )

    [one] = scan(tmp_path)

    assert list(one.versions) == [10**18, 2**63 - 1]
    assert one.warnings == (
        "the folder 10000000000000000000 is not a version: the number is larger than 9223372036854775807",
        "the folder 9223372036854775808 is not a version: the number is larger than 9223372036854775807",
    )


def test_folder_of_bare_model_files_is_a_repository(tmp_path: Path) -> None:
    for name in ("resnet.onnx", "ocr.v2.xml", "ocr.v2.bin", "t.pt2", "tag.py", "chat.gguf", "README.md", ".x.onnx"):
        (tmp_path / name).touch()
    (tmp_path / "data").mkdir()

    models = found(tmp_path)

    assert list(models) == ["chat", "ocr.v2", "resnet", "t", "tag"]
    config = read(models["ocr.v2"]).config
    assert (config.name, config.backend, config.model_file) == ("ocr.v2", "openvino", "ocr.v2.xml")
    assert dict(read(models["t"]).versions) == {1: tmp_path}
    assert (read(models["t"]).config.backend, read(models["tag"]).config.backend) == ("pytorch", "python")
    tuned = read(models["resnet"], '{"max_batch_size": 8}').config
    assert (tuned.max_batch, tuned.backend, tuned.model_file) == (8, "onnxruntime", "resnet.onnx")
    with pytest.raises(BadModel, match=r"chat\.gguf is a language model: serve it with `forebay up`"):
        read(models["chat"])


def test_two_bare_files_with_one_name_are_reported(tmp_path: Path) -> None:
    (tmp_path / "m.onnx").touch()
    (tmp_path / "m.pt").touch()

    [one] = scan(tmp_path)

    assert one.problems == (f"it exists twice: {tmp_path / 'm.onnx'} and {tmp_path / 'm.pt'}",)


def test_repositories_are_merged_and_duplicate_models_are_reported(tmp_path: Path) -> None:
    model(tmp_path / "x", "", name="a")
    model(tmp_path / "x", "", name="both")
    model(tmp_path / "y", "", name="both")
    model(tmp_path / "y", "", name="c")

    models = found(tmp_path / "y", tmp_path / "x")

    assert list(models) == ["a", "both", "c"]
    assert models["both"].problems == (f"it exists twice: {tmp_path / 'x/both'} and {tmp_path / 'y/both'}",)
    with pytest.raises(BadModel, match="it exists twice"):
        read(models["both"])


def test_invalid_repository_path_is_rejected(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        scan(tmp_path / "absent")
    with pytest.raises(BadModel, match="is the folder of a model; the repository is the folder above it"):
        scan(model(tmp_path, "") / "m")
    assert scan() == []
    (tmp_path / "empty").mkdir()
    assert scan(tmp_path / "empty") == []


LINKS = {
    "the model": "evil",
    "the configuration": "evil/config.pbtxt",
    "a version": "evil/1",
    "a file of a version": "evil/1/model.onnx",
}


@pytest.mark.parametrize("link", LINKS.values(), ids=LINKS)
def test_symlink_out_of_the_repository_affects_only_its_model(tmp_path: Path, link: str) -> None:
    outside = model(tmp_path / "outside", "max_batch_size: 1")
    root = model(tmp_path / "repository", "", name="good")
    (root / link).parent.mkdir(parents=True, exist_ok=True)
    (root / link).symlink_to(outside / "m")

    models = found(root)

    (problem,) = models["evil"].problems
    assert problem.startswith(f"{root / link} is a link out of the repository")
    assert "--allow-links-to" in problem
    assert not models["good"].problems
    read(models["good"])


@pytest.mark.parametrize("link", ["m", "m/1", "m/1/model.py", "m/l"])
def test_symlinks_to_an_allowed_folder_are_followed(tmp_path: Path, link: str) -> None:
    text = "output { name: 'OUT' data_type: TYPE_FP32 dims: 2 label_filename: 'l' }"
    model(tmp_path / "files", text, "1/model.py", "l")
    (tmp_path / "repository").mkdir()
    whole = model(tmp_path / "repository", text, "1/model.py", "l", name="m") if link != "m" else None
    if whole is not None:
        path = tmp_path / "repository" / link
        shutil.rmtree(path) if path.is_dir() else path.unlink()
    (tmp_path / "repository" / link).symlink_to(tmp_path / "files" / link)
    (tmp_path / "alias").symlink_to("files")

    [one] = scan(tmp_path / "repository", linked=[tmp_path / "alias"])

    assert not one.problems
    assert list(one.versions) == [1]
    read(one)
    assert scan(tmp_path / "repository")[0].problems


def test_lost_and_found_folder_is_ignored(tmp_path: Path) -> None:
    (tmp_path / "lost+found").mkdir()

    assert scan(tmp_path) == []


def test_symlinks_within_the_repository_are_followed(tmp_path: Path) -> None:
    model(tmp_path, "", "..data/1/model.py", "other")
    (tmp_path / "m/1").symlink_to("..data/1")
    (tmp_path / "m/2").symlink_to("1")
    (tmp_path / "m/loop").symlink_to(".")

    [one] = scan(tmp_path)

    assert list(one.versions) == [1, 2]
    assert not one.problems


@pytest.mark.parametrize(
    ("target", "problem"), [("nowhere.onnx", "cannot be read"), ("../out.onnx", "is a link out of the repository")]
)
def test_bare_file_behind_a_bad_link_is_reported_by_its_model_name(target: str, problem: str, tmp_path: Path) -> None:
    root = tmp_path / "repository"
    root.mkdir()
    (tmp_path / "out.onnx").touch()
    (root / "good.onnx").touch()
    (root / "m.onnx").symlink_to(target)

    models = found(root)

    assert list(models) == ["good", "m"]
    assert problem in models["m"].problems[0]
    assert not models["good"].problems


def test_links_in_a_loop_affect_only_their_model(tmp_path: Path) -> None:
    (tmp_path / "good.onnx").touch()
    (tmp_path / "loop.onnx").symlink_to("loop.onnx")

    models = found(tmp_path)

    assert "cannot be read" in models["loop"].problems[0]
    assert not models["good"].problems


@pytest.mark.parametrize("where", ["m/1/link", "m"])
def test_dangling_symlink_affects_only_its_model(tmp_path: Path, where: str) -> None:
    root = model(tmp_path, "", name="good")
    (root / where).parent.mkdir(parents=True, exist_ok=True)
    (root / where).symlink_to(root / where)

    models = found(root)

    assert "cannot be read" in models["m"].problems[0]
    assert not models["good"].problems


def test_unreadable_folder_affects_only_its_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model(tmp_path, "", name="ajar")
    model(tmp_path, "", name="good")
    (tmp_path / "client.py").touch()
    listdir = os.listdir

    def refuse(path: "os.PathLike[str] | str") -> list[str]:
        if os.fspath(path).endswith("ajar"):
            raise PermissionError(13, "Permission denied", os.fspath(path))
        return listdir(path)

    monkeypatch.setattr(os, "listdir", refuse)

    models = found(tmp_path)

    assert models["ajar"].problems == (f"{tmp_path / 'ajar'} cannot be read: Permission denied",)
    read(models["good"])


def test_unprintable_model_names_are_reported(tmp_path: Path) -> None:
    os.mkdir(os.fsencode(tmp_path) + b"/a\xff")
    (tmp_path / "b\n").mkdir()
    (tmp_path / "c").mkdir()

    models = scan(tmp_path)

    assert [each.name for each in models] == ["a\\udcff", "b\n", "c"]
    with pytest.raises(BadModel) as raised:
        read(models[0])
    assert raised.value.text.encode()
    assert ["not text" in str(each.problems) for each in models] == [True, True, False]


def test_folder_depth_is_limited(tmp_path: Path) -> None:
    model(tmp_path, "", "/".join("d" * (DEPTH_MAX + 2)) + "/x")

    assert found(tmp_path)["m"].problems == (f"{tmp_path / 'm'} has more than {DEPTH_MAX} folders deep",)


def test_named_pipe_is_reported_and_not_opened(tmp_path: Path) -> None:
    model(tmp_path, None)
    os.mkfifo(tmp_path / "m/config.pbtxt")

    [one] = scan(tmp_path)

    assert one.problems == (f"{tmp_path / 'm/config.pbtxt'} is neither a file nor a folder",)


def test_stamp_changes_with_any_file_but_not_with_pycache(tmp_path: Path) -> None:
    model(tmp_path, "", "1/model.py", "labels.txt")

    def stamp() -> str:
        return scan(tmp_path)[0].stamp

    seen = [stamp()]
    assert stamp() == seen[0]
    for change in (
        lambda: (tmp_path / "m/labels.txt").write_text("cat"),
        lambda: os.utime(tmp_path / "m/1/model.py", (5, 5)),
        lambda: (tmp_path / "m/1/model.py").rename(tmp_path / "m/1/other.py"),
        lambda: os.remove(tmp_path / "m/1/other.py"),
    ):
        change()
        seen.append(stamp())
    assert len(set(seen)) == len(seen)
    (tmp_path / "m/1/__pycache__").mkdir()
    (tmp_path / "m/1/__pycache__/model.pyc").touch()
    assert stamp() == seen[-1]


@pytest.mark.parametrize(("model", "weights"), [("m.xml", "m.bin"), ("m.onnx", "m.onnx.data"), ("m.onnx", "m.data")])
def test_stamp_of_a_bare_model_covers_its_weights(tmp_path: Path, model: str, weights: str) -> None:
    for name in (model, weights, "m2.onnx", "m.v2.onnx"):
        (tmp_path / name).touch()

    def stamp() -> str:
        (found,) = (each for each in scan(tmp_path) if each.name == "m")
        return found.stamp

    before = stamp()
    (tmp_path / "m2.onnx").write_bytes(b"1")
    (tmp_path / "m.v2.onnx").write_bytes(b"1")
    assert stamp() == before
    (tmp_path / weights).write_bytes(b"1")
    assert stamp() != before
