"""One-off preparation of an artifact before workers load it: validation and conversion.

Problems of a model are reported here, once and to its owner, rather than by replicas that fail at startup.
"""

import os
from collections.abc import Mapping
from pathlib import Path
from typing import BinaryIO

import msgspec

from forebay.engines.gguf_convert import convert, needs_conversion
from forebay.engines.gguf_header import read_header
from forebay.engines.protocol import EngineBroken
from forebay.registry.digests import file_digest
from forebay.registry.sources import Progress, exclusive
from forebay.wire.documents import UNREADABLE

DIGEST_CHARS = 16
_ONNX_GRAPH_FIELD = 7
_VARINT_BYTES_MAX = 10


def prepare(
    engine: str,
    source_path: Path,
    settings: Mapping[str, int | float | str | bool],
    cache_dir: Path,
    progress: Progress,
) -> Path:
    """The path to pass to `create`. Raises `EngineBroken` if the model is missing, truncated or invalid."""
    if engine == "synthetic":
        return source_path
    try:
        if not source_path.exists():
            raise EngineBroken(f"{source_path}: no such file or folder")
        if engine == "onnx":
            _check_embedding_model(source_path)
        elif engine == "openvino" and source_path.is_dir():
            _check_openvino_model(source_path)
        elif source_path.is_dir():
            raise EngineBroken(f"{source_path}: a folder; engine {engine!r} takes a .gguf file")
        elif engine == "openvino" and settings.get("convert", "auto") == "auto" and needs_conversion(source_path):
            return _converted(source_path, cache_dir, progress)
        else:
            read_header(source_path)
    except OSError as error:
        raise EngineBroken(f"{source_path}: cannot be prepared: {error}") from error
    except ImportError as error:
        text = f"{source_path}: the conversion needs a library that is missing ({error}); pip install 'forebay[llm]'"
        raise EngineBroken(text) from error
    return source_path


def _converted(source: Path, cache_dir: Path, progress: Progress) -> Path:
    """The converted file, cached. One process converts while others wait for it."""
    cache_dir.mkdir(parents=True, exist_ok=True)
    target = cache_dir / f"{file_digest(source, cache_dir, progress)[:DIGEST_CHARS]}-q8_0.gguf"
    if _whole(target):
        return target
    stage = f"converting {source.name}"
    with exclusive(target.with_suffix(".lock"), lambda: progress(f"waiting for another process {stage}", 0, None)):
        if not _whole(target):
            convert(source, target, lambda done, total: progress(stage, done, total))
    return target


def _whole(target: Path) -> bool:
    try:
        return target.exists() and not needs_conversion(target)
    except EngineBroken:
        return False


def _check_openvino_model(folder: Path) -> None:
    for name in ("openvino_model.xml", "openvino_model.bin", "openvino_tokenizer.xml", "openvino_detokenizer.xml"):
        file = folder / name
        if not file.is_file() or not file.stat().st_size:
            raise EngineBroken(f"{file} is missing or empty; export the model again (optimum-cli export openvino)")


def _check_embedding_model(path: Path) -> None:
    file = path / "model.onnx" if path.is_dir() else path
    if not file.is_file():
        raise EngineBroken(f"{file} is missing; an embedding model is a folder with model.onnx and tokenizer.json")
    tokenizer = file.parent / "tokenizer.json"
    if not tokenizer.is_file():
        raise EngineBroken(f"{tokenizer} is missing; an embedding model needs it beside {file.name}")
    try:
        msgspec.json.decode(tokenizer.read_bytes(), type=dict[str, msgspec.Raw])
    except UNREADABLE as error:
        raise EngineBroken(f"{tokenizer}: not a tokenizer: {error}; fetch the model again") from error
    with file.open("rb") as model:
        if not _is_whole_onnx(model, file.stat().st_size):
            raise EngineBroken(f"{file}: not an ONNX model, or cut short; fetch it again")


def _is_whole_onnx(file: BinaryIO, size: int) -> bool:
    """Scan the top-level fields of the protobuf message: they must end where the file ends, and include a graph."""
    has_graph = False
    while file.tell() < size:
        key = _varint(file)
        match None if key is None else key & 7:
            case 0:
                skip = 0 if _varint(file) is not None else None
            case 1:
                skip = 8
            case 2:
                skip = _varint(file)
            case 5:
                skip = 4
            case _:
                skip = None
        if key is None or skip is None or file.tell() + skip > size:
            return False
        has_graph |= key >> 3 == _ONNX_GRAPH_FIELD
        file.seek(skip, os.SEEK_CUR)
    return has_graph


def _varint(file: BinaryIO) -> int | None:
    value = 0
    for place in range(_VARINT_BYTES_MAX):
        byte = file.read(1)
        if not byte:
            return None
        value |= (byte[0] & 0x7F) << 7 * place
        if byte[0] < 0x80:
            return value
    return None
