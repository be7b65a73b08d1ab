"""`forebay repository demo`: what it writes, what it leaves alone, and what it rejects."""

import hashlib
import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from forebay.cli.repository.demos import tabular
from forebay.cli.repository.demos.table import DEMO
from forebay.cli.repository.demos.writing import DRAFT, DemoModel, Made, Part, chosen, write
from forebay.core.task_tensors import PARAMETER
from forebay.modelserver.repository import read, scan
from forebay.modelserver.tasks.table import TASKS
from forebay.registry.sources import SourceError

WEIGHTS = bytes(range(256)) * 64


def quiet(stage: str, done: int, total: int | None) -> None:
    """Progress that nobody watches."""


@pytest.fixture
def part(tmp_path: Path) -> Part:
    """A file that stands for one in a package."""
    (tmp_path / "package").mkdir()
    (tmp_path / "package" / "weights.bin").write_bytes(WEIGHTS)
    return Part(str(tmp_path / "package"), hashlib.sha256(WEIGHTS).hexdigest(), "weights.bin")


@pytest.fixture
def home(tmp_path: Path) -> Path:
    return tmp_path / "home"


def test_written_model_has_packaged_downloaded_and_generated_files(tmp_path: Path, home: Path, part: Part) -> None:
    def make(target: Path, sources: Sequence[Path]) -> None:
        target.write_bytes(sources[0].read_bytes()[::-1])

    files = {"1/deep/weights.bin": part, "1/turned.bin": Made(make, (part,))}
    write(replace(DEMO["file-type"], files=files), tmp_path, home, quiet)
    folder = tmp_path / "file-type"
    assert (folder / "1/deep/weights.bin").read_bytes() == WEIGHTS
    assert (folder / "1/turned.bin").read_bytes() == WEIGHTS[::-1]
    assert {str(each.relative_to(folder)) for each in folder.rglob("*") if each.is_file()} == {
        "config.pbtxt", "1/model.py", "1/deep/weights.bin", "1/turned.bin",
    }  # fmt: skip


def test_existing_files_are_left_alone(tmp_path: Path, home: Path, part: Part) -> None:
    folder = tmp_path / "file-type"
    (folder / "1").mkdir(parents=True)
    for name in ("config.pbtxt", "1/weights.bin"):
        (folder / name).write_text("mine")
    write(replace(DEMO["file-type"], files={"1/weights.bin": part}), tmp_path, home, quiet)
    assert (folder / "config.pbtxt").read_text() == (folder / "1/weights.bin").read_text() == "mine"
    assert (folder / "1/model.py").is_file()


@pytest.mark.parametrize(
    ("change", "said"), [({"sha256": "0" * 64}, "SHA-256 is"), ({"inside": "nothing"}, "no such file")]
)
def test_download_with_the_wrong_content_is_rejected(
    change: dict[str, str], said: str, tmp_path: Path, home: Path, part: Part
) -> None:
    model = replace(DEMO["file-type"], files={"1/weights.bin": replace(part, **change)})
    with pytest.raises(SourceError, match=said):
        write(model, tmp_path, home, quiet)
    assert not (tmp_path / "file-type" / "config.pbtxt").exists(), "a server would take it for a model"


def test_failed_generation_leaves_no_file_behind(tmp_path: Path, home: Path) -> None:
    def make(target: Path, _: Sequence[Path]) -> None:
        target.write_bytes(b"half")
        raise ImportError("no such package")

    with pytest.raises(ImportError):
        write(replace(DEMO["file-type"], files={"1/a.bin": Made(make)}), tmp_path, home, quiet)
    assert [each.name for each in (tmp_path / "file-type" / "1").iterdir()] == [f"a.bin{DRAFT}"]


def test_models_include_their_dependencies() -> None:
    models = {
        "both": DemoModel("both", "", "", uses=("one", "two")),
        "one": DemoModel("one", "", "", uses=("two",)),
        "two": DemoModel("two", "", ""),
        "other": DemoModel("other", "", ""),
    }
    assert [each.name for each in chosen(models, ["both"])] == ["both", "one", "two"]
    assert [each.name for each in chosen(models, [])] == ["both", "one", "two", "other"]
    with pytest.raises(KeyError):
        chosen(models, ["none"])


@pytest.mark.parametrize("name", sorted(DEMO))
def test_every_demo_model_is_valid_and_declares_its_task(name: str, tmp_path: Path, home: Path) -> None:
    model = DEMO[name]
    (tmp_path / name / "1").mkdir(parents=True)  # of which the weights are the only file, it may be
    write(replace(model, files={}), tmp_path, home, quiet)
    (found,) = scan(tmp_path)
    described = read(found)
    assert described.config.parameters.get(PARAMETER, "") == model.task
    assert model.task in {"", *(task.name for task in TASKS.values())}
    assert set(model.uses) >= {step.model for step in described.config.steps}
    assert set(model.uses) <= set(DEMO)
    assert bool(model.extra) or not model.needs


def test_recommender_recommends_items_of_similar_users(tmp_path: Path) -> None:
    onnxruntime, _ = pytest.importorskip("onnxruntime"), pytest.importorskip("onnx")
    tabular.make(tmp_path / "model.onnx", ())
    session = onnxruntime.InferenceSession(str(tmp_path / "model.onnx"))
    users = np.arange(tabular.USERS, dtype=np.int64)[:, None]
    items, scores = session.run(None, {"USER": users})
    assert items.shape == scores.shape == (tabular.USERS, tabular.BEST)
    assert (items % tabular.TASTES == users % tabular.TASTES).mean() > 0.99
    assert not np.take_along_axis(tabular.interactions(), items, 1).any(), "what a user has used is no news"
    assert (np.diff(scores) <= 0).all()
    strangers = session.run(["ITEM"], {"USER": np.array([[-1], [tabular.USERS]])})[0]
    popular = np.argsort(-tabular.interactions().mean(axis=0), kind="stable")[: tabular.BEST]
    assert (strangers == popular).all()


def test_full_rank_factorization_reproduces_the_matrix() -> None:
    matrix = np.random.default_rng(1).random((30, 20)).astype(np.float32)
    users, items = tabular.factors(matrix, 20)
    assert np.allclose(users @ items, matrix, atol=1e-4)


@pytest.fixture
def cli(tmp_path: Path) -> Callable[..., "subprocess.CompletedProcess[str]"]:
    def run(*words: str) -> "subprocess.CompletedProcess[str]":
        return subprocess.run(
            [sys.executable, "-m", "forebay.cli.main", "repository", *words],
            cwd=tmp_path,
            env={**os.environ, "NO_COLOR": "1"},
            capture_output=True,
            text=True,
            timeout=60,
        )

    return run


def test_command_lists_and_writes_models(
    cli: Callable[..., "subprocess.CompletedProcess[str]"], tmp_path: Path
) -> None:
    listed = cli("demo", "--list").stdout
    assert all(name in listed for name in DEMO)
    steps = {step for model in DEMO.values() for step in model.uses}
    assert {line.split()[0] for line in listed.splitlines() if line[:1].strip()} - {"model"} == DEMO.keys() - steps
    wrong = cli("demo", "there", "no-such-model")
    assert wrong.returncode == 2
    assert "no-such-model" in wrong.stderr
    assert "bge-small-en" in wrong.stderr
    pytest.importorskip("onnx")
    made = cli("demo", "there", "recommender")
    assert made.returncode == 0, made.stderr
    assert "forebay serve --repository there" in made.stdout
    assert (tmp_path / "there" / "recommender" / "1" / "model.onnx").stat().st_size > 1_000_000
