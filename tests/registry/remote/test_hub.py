"""Models of the Hugging Face Hub from its local cache, without network access."""

from pathlib import Path

import huggingface_hub.constants
import pytest

from forebay.registry.sources import SourceError, obtain, parse

COMMIT = "0123456789abcdef0123456789abcdef01234567"


@pytest.fixture
def cached(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cache with one model, as the library lays it out, and no way to the Hub."""
    folder = tmp_path / "hub" / "models--acme--tiny"
    (folder / "refs").mkdir(parents=True)
    (folder / "refs" / "main").write_text(COMMIT)
    snapshot = folder / "snapshots" / COMMIT
    (snapshot / "onnx").mkdir(parents=True)
    (snapshot / "config.json").write_text("{}")
    (folder / "blobs").mkdir()
    (folder / "blobs" / "abc").write_bytes(b"onnx")
    (snapshot / "onnx" / "model.onnx").symlink_to("../../../blobs/abc")
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    return snapshot


def quiet(stage: str, done: int, total: int | None) -> None:
    """Progress that nobody looks at."""


@pytest.mark.parametrize(
    ("source", "inner"),
    [
        ("hf://acme/tiny", ""),
        ("hf://acme/tiny@main", ""),
        (f"hf://acme/tiny@{COMMIT}", ""),
        ("hf://acme/tiny/onnx", "onnx"),
        ("hf://acme/tiny@main/onnx/model.onnx", "onnx/model.onnx"),
    ],
)
def test_cached_model_is_used_offline(cached: Path, tmp_path: Path, source: str, inner: str) -> None:
    assert obtain(parse(source), tmp_path, quiet) == cached / inner


@pytest.mark.parametrize(
    ("source", "said"),
    [
        ("hf://acme/other", "the cache does not have it"),
        ("hf://acme/tiny@v2", "the cache does not have it"),
        ("hf://acme/tiny/none.onnx", "there is no none.onnx in it"),
        ("hf://acme", "not of the form hf://ORGANISATION/NAME"),
        ("hf://", "not of the form hf://ORGANISATION/NAME"),
    ],
)
def test_model_missing_from_the_cache_is_reported(cached: Path, tmp_path: Path, source: str, said: str) -> None:
    with pytest.raises(SourceError, match=said):
        obtain(parse(source), tmp_path, quiet)
