"""Preparing artifacts: invalid models are rejected before a worker starts, and conversions are cached."""

import shutil
import threading
from pathlib import Path

import pytest

from forebay.engines.prepare import prepare
from forebay.engines.protocol import EngineBroken

SMALLEST_ONNX = b"\x08\x08" + b"\x3a\x04" + b"\x0a\x02hi"
"""ir_version 8 and a graph of four bytes, as protobuf."""


def quiet(stage: str, done: int, total: int | None) -> None:
    """Progress that nobody watches."""


def embedding_model(folder: Path, model: bytes = SMALLEST_ONNX, tokenizer: str = "{}") -> Path:
    folder.mkdir()
    (folder / "model.onnx").write_bytes(model)
    (folder / "tokenizer.json").write_text(tokenizer)
    return folder


def test_artifact_without_conversion_is_used_in_place(tmp_path: Path) -> None:
    folder = embedding_model(tmp_path / "m")
    assert prepare("onnx", folder, {}, tmp_path / "cache", quiet) == folder
    assert prepare("onnx", folder / "model.onnx", {}, tmp_path / "cache", quiet) == folder / "model.onnx"
    assert prepare("synthetic", tmp_path / "gone", {}, tmp_path / "cache", quiet) == tmp_path / "gone"
    assert not (tmp_path / "cache").exists()


@pytest.mark.parametrize("length", range(len(SMALLEST_ONNX)))
def test_truncated_onnx_file_is_rejected(tmp_path: Path, length: int) -> None:
    folder = embedding_model(tmp_path / "m", SMALLEST_ONNX[:length])
    with pytest.raises(EngineBroken, match=r"model\.onnx: not an ONNX model, or cut short"):
        prepare("onnx", folder, {}, tmp_path / "cache", quiet)


@pytest.mark.parametrize("content", [b"GGUF" * 100, b"\xff" * 100, b"<html>not found</html>", bytes(100)])
def test_non_onnx_file_is_rejected(tmp_path: Path, content: bytes) -> None:
    folder = embedding_model(tmp_path / "m", content)
    with pytest.raises(EngineBroken, match=r"model\.onnx: not an ONNX model"):
        prepare("onnx", folder, {}, tmp_path / "cache", quiet)


@pytest.mark.parametrize("engine", ["openvino", "llamacpp", "onnx"])
def test_missing_file_is_named(tmp_path: Path, engine: str) -> None:
    with pytest.raises(EngineBroken, match=r"gone\.gguf: no such file"):
        prepare(engine, tmp_path / "gone.gguf", {}, tmp_path / "cache", quiet)


@pytest.mark.parametrize("engine", ["openvino", "llamacpp"])
@pytest.mark.parametrize("content", [b"", b"GGUF", b"GGUF" + bytes(16), b"nope" * 100])
def test_non_gguf_file_is_rejected(tmp_path: Path, engine: str, content: bytes) -> None:
    (tmp_path / "m.gguf").write_bytes(content)
    with pytest.raises(EngineBroken, match=r"m\.gguf"):
        prepare(engine, tmp_path / "m.gguf", {}, tmp_path / "cache", quiet)


def test_incomplete_folders_are_rejected(tmp_path: Path) -> None:
    folder = embedding_model(tmp_path / "m", tokenizer="{")
    for engine, words in (
        ("llamacpp", "a folder"),
        ("openvino", r"openvino_model\.xml"),
        ("onnx", "not a tokenizer"),
    ):
        with pytest.raises(EngineBroken, match=words):
            prepare(engine, folder, {}, tmp_path / "cache", quiet)
    (folder / "tokenizer.json").unlink()
    with pytest.raises(EngineBroken, match=r"tokenizer\.json is missing"):
        prepare("onnx", folder, {}, tmp_path / "cache", quiet)


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_conversion_is_cached_and_repeated_when_damaged(smollm2_gguf: Path, tmp_path: Path) -> None:
    cache, stages = tmp_path / "cache", set[tuple[int, str]]()
    results: list[Path] = []

    def watch(stage: str, done: int, total: int | None) -> None:
        stages.add((threading.get_ident(), stage.split(maxsplit=1)[0]))

    def convert() -> None:
        results.append(prepare("openvino", smollm2_gguf, {}, cache, watch))

    at_once = [threading.Thread(target=convert) for _ in range(2)]
    for thread in at_once:
        thread.start()
    for thread in at_once:
        thread.join()
    assert results == [cache / "b179c9523d0e6a0f-q8_0.gguf"] * 2
    assert sorted(stage for _, stage in stages if stage != "checking") == ["converting", "waiting"]
    size = results[0].stat().st_size
    stages.clear()
    convert()
    assert not stages, "the cached file is used"
    with results[0].open("r+b") as file:
        file.truncate(size - 1000)
    convert()
    assert results[-1].stat().st_size == size
    assert prepare("openvino", smollm2_gguf, {"convert": "never"}, cache, watch) == smollm2_gguf
    assert prepare("llamacpp", smollm2_gguf, {}, cache, watch) == smollm2_gguf
    shutil.copy(smollm2_gguf, tmp_path / "cut.gguf")
    with (tmp_path / "cut.gguf").open("r+b") as file:
        file.truncate(size // 4)
    with pytest.raises(EngineBroken, match=r"cut\.gguf: truncated"):
        prepare("openvino", tmp_path / "cut.gguf", {}, cache, watch)
