"""Metadata that model files yield when they are registered."""

import json
import struct
from pathlib import Path

import pytest

from forebay.cli.registry.facts import CARD_BYTES_MAX, facts_of

CARD = "---\nlanguage: en\nlicense: 'apache-2.0'  # as it came\n---\n# A model\nlicense: none\n"


def text(words: str) -> bytes:
    return struct.pack("<Q", len(words)) + words.encode()


def gguf(path: Path) -> Path:
    """Two tensors: a large one of Q4_1 and a small one of F32."""
    entries = {"general.architecture": "llama", "general.license": "mit"}
    metadata = b"".join(text(key) + struct.pack("<I", 8) + text(value) for key, value in entries.items())
    metadata += text("llama.context_length") + struct.pack("<II", 4, 2048)
    tensors = text("w") + struct.pack("<IQIQ", 1, 320, 3, 0) + text("b") + struct.pack("<IQIQ", 1, 8, 0, 224)
    path.write_bytes(b"GGUF" + struct.pack("<IQQ", 3, 2, 3) + metadata + tensors + bytes(512))
    return path


def test_gguf_file_yields_precision_context_and_licence(tmp_path: Path) -> None:
    assert facts_of(gguf(tmp_path / "m.gguf")) == {"precision": "Q4_1", "context_tokens": "2048", "licence": "mit"}


@pytest.mark.parametrize(
    ("config", "found"),
    [
        (
            {"torch_dtype": "bfloat16", "max_position_embeddings": 8192},
            {"precision": "bfloat16", "context_tokens": "8192"},
        ),
        (
            {"text_config": {"dtype": "float16", "n_positions": 512}},
            {"precision": "float16", "context_tokens": "512"},
        ),
        (
            {"torch_dtype": "float16", "quantization_config": {"quant_method": "awq", "bits": 4}},
            {"precision": "awq 4 bits"},
        ),
        ({"quantization_config": {}}, {"precision": "quantized"}),
        ({"torch_dtype": "x" * 1000}, {"precision": "x" * 200}),
        ([], {}),
    ],
)
def test_folder_yields_the_facts_of_its_configuration(tmp_path: Path, config: object, found: dict[str, str]) -> None:
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert facts_of(tmp_path) == found


def test_model_card_and_its_licence_are_found(tmp_path: Path) -> None:
    (tmp_path / "README.md").write_text(CARD)
    assert facts_of(tmp_path) == {"licence": "apache-2.0", "card": "README.md"}
    (tmp_path / "README.md").write_text("# A model\nlicense: none\n" + "x" * CARD_BYTES_MAX)
    assert facts_of(tmp_path) == {"card": "README.md"}


def test_unreadable_files_yield_no_facts(tmp_path: Path) -> None:
    (tmp_path / "m.gguf").write_bytes(b"GGUF")
    (tmp_path / "m.onnx").write_bytes(b"")
    for name in ("m.gguf", "m.onnx", "none"):
        assert facts_of(tmp_path / name) == {}
    assert facts_of(tmp_path) == {}
