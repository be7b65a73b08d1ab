"""What is estimated of a replica's memory from its files."""

import json
import struct
from pathlib import Path

import pytest

from forebay.core.placement.memory import GPU_OVERHEAD_BYTES, NCCL_BYTES, kv_bytes
from forebay.engines.gguf_header import Header, Tensor
from forebay.engines.sizing.configs import UnknownArchitecture
from forebay.engines.sizing.estimate import CHILD_BYTES, KV_BITS, LIBRARIES_BYTES, SHELL_BYTES, estimate
from forebay.engines.sizing.gguf import architecture_of_gguf

SMOLLM2 = {"hidden_size": 576, "num_hidden_layers": 30, "num_attention_heads": 9, "num_key_value_heads": 3}
TOKEN = 23_040


def header(arch: str, **keys: object) -> Header:
    metadata = {f"{arch}.{key.replace('__', '.')}": value for key, value in keys.items()}
    tensor = Tensor("t", 0, (7, 11), 0, 308)
    return Header({"general.architecture": arch, **metadata}, (tensor,))


LLAMA = {"block_count": 4, "embedding_length": 512, "attention__head_count": 8, "attention__head_count_kv": 2}


@pytest.mark.parametrize(
    ("found", "expected"),
    [
        (header("llama", **LLAMA), 4 * 2 * 128 * 10),
        (header("llama", **{**LLAMA, "attention__head_count_kv": None}), 4 * 8 * 128 * 10),
        (header("llama", **LLAMA, attention__key_length=96, attention__value_length=32), 4 * 2 * 128 * 10),
        (header("llama", **LLAMA, attention__sliding_window=3), 4 * 2 * 128 * 3),
        (header("gemma2", **LLAMA, attention__sliding_window=3), 2 * 2 * 128 * 13),
        (
            header("x", **LLAMA, attention__sliding_window=3, attention__sliding_window_pattern=[True, True, False]),
            2 * 128 * (3 + 3 + 10 + 10),
        ),
        (header("x", **LLAMA, attention__sliding_window=3, attention__sliding_window_pattern=4), 2 * 128 * 19),
        (header("deepseek2", **LLAMA, attention__kv_lora_rank=32, rope__dimension_count=8), 4 * 40 * 10),
        (
            header(
                "jamba",
                **{**LLAMA, "attention__head_count_kv": [0, 2, 0, 2], "attention__head_count": [0, 8, 0, 8]},
                ssm__inner_size=100,
                ssm__state_size=16,
                ssm__conv_kernel=4,
            ),
            2 * 2 * 128 * 10 + 2 * 100 * (16 + 3),
        ),
    ],
)
def test_a_gguf_file_says_what_ten_tokens_keep(found: Header, expected: int) -> None:
    architecture = architecture_of_gguf(found)
    assert kv_bytes(architecture, [10]) == expected * 2
    assert architecture.parameters == 77


@pytest.mark.parametrize("keys", [{}, {"block_count": 2}, {**LLAMA, "attention__head_count_kv": [1, 2]}])
def test_a_gguf_file_that_does_not_say_enough_is_no_guess(keys: dict[str, object]) -> None:
    with pytest.raises(UnknownArchitecture, match="how many layers and heads"):
        architecture_of_gguf(header("llama", **keys))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "config.json").write_text(json.dumps(SMOLLM2))
    (tmp_path / "openvino_model.bin").write_bytes(bytes(1000))
    (tmp_path / "tokenizer.json").write_bytes(bytes(5000))
    return tmp_path


def test_weights_and_cache_and_engine_add_up(folder: Path) -> None:
    found = estimate("openvino", str(folder), {"kv_cache_tokens": 100}, 0)
    assert found.weights_bytes == 2000
    assert found.kv_bytes == 100 * TOKEN * KV_BITS["openvino"] / 16
    assert found.overhead_bytes == SHELL_BYTES + CHILD_BYTES + LIBRARIES_BYTES["openvino"]


def test_of_a_folder_only_what_is_loaded_counts(tmp_path: Path) -> None:
    for name, size in (("model.onnx", 10), ("model.onnx_data", 20), ("a/1/model.onnx", 40), ("b/1/model.pt", 80)):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_bytes(bytes(size))
    assert estimate("onnx", str(tmp_path), {}, 0).weights_bytes == 2 * 30
    assert estimate("modelserver", str(tmp_path), {"load": "needed"}, 0).weights_bytes == 2 * 80
    assert estimate("modelserver", str(tmp_path), {"load": "all"}, 0).weights_bytes == 2 * 150
    assert estimate("openvino", str(tmp_path), {}, 0).weights_bytes == 0


def test_gpus_share_weights_and_heads(folder: Path) -> None:
    found = estimate("any", str(folder), {"kv_cache_tokens": 100}, 2)
    assert found == (500, 30 * 2 * 128 * 2 * 100, GPU_OVERHEAD_BYTES + NCCL_BYTES)


def test_what_cannot_be_read_counts_as_its_file_or_as_nothing(tmp_path: Path) -> None:
    overhead = SHELL_BYTES + CHILD_BYTES
    assert estimate("synthetic", "synthetic", {}, 0) == (0, 0, overhead)
    assert estimate("synthetic", "synthetic", {}, 1).total_bytes == 0
    assert estimate("any", str(tmp_path / "none"), {"kv_cache_tokens": 9}, 0) == (0, 0, overhead)
    bare = tmp_path / "model.onnx"
    bare.write_bytes(bytes(300))
    (tmp_path / "model.onnx_data").write_bytes(bytes(500))
    assert estimate("any", str(bare), {}, 0).weights_bytes == 800
    other = tmp_path / "weights.xyz"
    other.write_bytes(bytes(7))
    assert estimate("any", str(other), {"kv_cache_tokens": 9}, 0)[:2] == (7, 0)
    broken = tmp_path / "broken.gguf"
    broken.write_bytes(b"GGUF")
    assert estimate("any", str(broken), {"kv_cache_tokens": 9}, 0)[:2] == (4, 0)
    empty = tmp_path / "empty.gguf"
    empty.write_bytes(b"GGUF" + struct.pack("<IQQ", 3, 0, 0))
    assert estimate("any", str(empty), {"kv_cache_tokens": 9}, 0)[:2] == (24, 0)
    (tmp_path / "config.json").write_text("{}")
    assert estimate("any", str(tmp_path), {"kv_cache_tokens": 9}, 0).kv_bytes == 0
