"""Metadata of a revision from the files of its model; `--meta` adds more."""

import re
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Final

import msgspec

from forebay.engines.gguf_header import BLOCKS, Header, read_header
from forebay.engines.protocol import EngineBroken
from forebay.wire.documents import UNREADABLE

CONFIG_BYTES_MAX: Final = 1024 * 1024
CARD_BYTES_MAX: Final = 64 * 1024
"""How much of a model card to read; its front matter comes first."""
WORDS_CHARS_MAX: Final = 200
FRONT: Final = re.compile(r"\A---\s*\n(.*?)\n---", re.DOTALL)
LICENCE: Final = re.compile(r"^license:[ \t]*[\"']?([^\s\"'#]+)", re.MULTILINE)
CONTEXT: Final = ("max_position_embeddings", "n_positions", "max_seq_len")


def facts_of(path: Path) -> dict[str, str]:
    """Precision, context length, licence and model card, of a GGUF file or a folder in Hugging Face layout.

    Unreadable files are skipped: loading the model will report them.
    """
    found = _of_gguf(path) if path.suffix == ".gguf" else _of_folder(path) if path.is_dir() else {}
    return {key: str(value)[:WORDS_CHARS_MAX] for key, value in found.items() if value}


def _of_gguf(path: Path) -> dict[str, object]:
    try:
        header = read_header(path)
    except EngineBroken:
        return {}
    return {
        "precision": _precision(header),
        "context_tokens": header.of_model("context_length"),
        "licence": header.metadata.get("general.license"),
    }


def _precision(header: Header) -> str:
    """The type of most of the weights, by bytes."""
    sizes = Counter[int]()
    for tensor in header.tensors:
        sizes[tensor.type] += tensor.bytes_size or 0
    most = max(sizes, key=lambda kind: (sizes[kind], -kind), default=None)
    return BLOCKS[most][0] if most in BLOCKS else ""


def _of_folder(path: Path) -> dict[str, object]:
    config = _config(path / "config.json")
    inner = config.get("text_config")
    text = {**config, **inner} if isinstance(inner, Mapping) else config
    card = path / "README.md"
    front = FRONT.match(_beginning(card, CARD_BYTES_MAX).decode(errors="replace"))
    licence = LICENCE.search(front[1]) if front else None
    return {
        "precision": _quantized(text) or text.get("dtype") or text.get("torch_dtype"),
        "context_tokens": next((text[key] for key in CONTEXT if isinstance(text.get(key), int)), None),
        "licence": licence[1] if licence else None,
        "card": card.name if card.is_file() else None,
    }


def _quantized(config: Mapping[str, object]) -> str:
    """How the weights are quantised; empty: not at all."""
    how = config.get("quantization_config")
    if not isinstance(how, Mapping):
        return ""
    words = [str(how["quant_method"])] if isinstance(how.get("quant_method"), str) else ["quantized"]
    return " ".join(words + ([f"{how['bits']} bits"] if isinstance(how.get("bits"), int) else []))


def _config(path: Path) -> dict[str, object]:
    try:
        return msgspec.json.decode(_beginning(path, CONFIG_BYTES_MAX), type=dict[str, object])
    except UNREADABLE:
        return {}


def _beginning(path: Path, bytes_max: int) -> bytes:
    try:
        with path.open("rb") as file:
            return file.read(bytes_max)
    except OSError:
        return b""
