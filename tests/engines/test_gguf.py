"""GGUF files: what a header must be before any work, and the conversion of inexact types."""

import resource
import struct
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import gguf
import numpy as np
import pytest

from forebay.engines.gguf_convert import convert, needs_conversion
from forebay.engines.gguf_header import read_header
from forebay.engines.protocol import EngineBroken

Q4_1, Q8_0 = gguf.GGMLQuantizationType.Q4_1, gguf.GGMLQuantizationType.Q8_0
TENSORS = {
    "token_embd.weight": ((48, 64), Q8_0),
    "blk.0.attn_q.weight": ((64, 64), Q4_1),
    "blk.0.attn_norm.weight": ((64,), gguf.GGMLQuantizationType.F32),
}


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """A small file of the kinds of tensors that the demo model has."""
    path = tmp_path / "small.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_context_length(4096)
    writer.add_file_type(3)
    writer.add_bool("tokenizer.ggml.add_bos_token", False)
    writer.add_token_list(["<s>", "Ġa", "é", "\n"])
    writer.add_bos_token_id(0)
    writer.add_array("numbers", [1.5, -2.0])
    writer.add_chat_template("{{ bos_token }}")
    rng = np.random.default_rng(1)
    for name, (shape, kind) in TENSORS.items():
        data = gguf.quants.quantize(rng.standard_normal(shape).astype(np.float32), kind)
        writer.add_tensor(name, data, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def test_the_header_is_read_without_the_library(model: Path) -> None:
    header = read_header(model)
    assert header.of_model("context_length") == 4096
    assert header.token("bos") == "<s>"
    assert header.token("eos") is None
    assert header.metadata["tokenizer.ggml.tokens"] == ["<s>", "Ġa", "é", "\n"]
    assert header.metadata["numbers"] == [1.5, -2.0]
    library = gguf.GGUFReader(model)
    assert [(t.name, t.offset, t.bytes_size) for t in header.tensors] == [
        (t.name, t.data_offset, t.n_bytes) for t in library.tensors
    ]


def test_a_file_cut_anywhere_is_called_truncated_or_no_model(model: Path, tmp_path: Path) -> None:
    whole, cut = model.read_bytes(), tmp_path / "cut.gguf"
    for size in [0, 2, 4, 7, 23, *range(24, len(whole) - 40, 97)]:
        cut.write_bytes(whole[:size])
        with pytest.raises(EngineBroken, match=r"cut\.gguf: (truncated|not a usable GGUF)"):
            read_header(cut)


def test_what_is_no_model_is_named_with_the_reason(tmp_path: Path) -> None:
    with pytest.raises(EngineBroken, match=r"none\.gguf: cannot be read: No such file"):
        read_header(tmp_path / "none.gguf")
    with pytest.raises(EngineBroken, match="Is a directory"):
        read_header(tmp_path)
    wrong = tmp_path / "wrong.gguf"
    huge = struct.pack("<QQ", 2**60, 2**60)
    for content, says in (
        (b"PK\x03\x04" + bytes(100), "begins with b'PK"),
        (b"GGUF" + struct.pack("<I", 99) + bytes(100), "version 99"),
        (b"GGUF" + struct.pack("<I", 3) + huge, "claims 1152921504606846976 entries"),
        (b"GGUF" + struct.pack("<IQQQ", 3, 0, 1, 2**40) + bytes(100), "claims"),
        (b"GGUF" + struct.pack("<IQQQ", 3, 0, 1, 1) + b"k" + struct.pack("<I", 77), "metadata type 77"),
    ):
        wrong.write_bytes(content)
        with pytest.raises(EngineBroken, match="not a usable GGUF model") as caught:
            read_header(wrong)
        assert says in str(caught.value)


def test_conversion_keeps_metadata_and_values_and_reports_progress(model: Path, tmp_path: Path) -> None:
    target, seen = tmp_path / "cache" / "out.gguf", list[tuple[int, int]]()
    assert needs_conversion(model)
    convert(model, target, lambda done, total: seen.append((done, total)))
    assert not needs_conversion(target)
    assert seen[-1][0] == seen[-1][1]
    assert [done for done, _ in seen] == sorted(done for done, _ in seen)
    assert [each.name for each in target.parent.iterdir()] == ["out.gguf"]
    before, after = read_header(model), read_header(target)
    assert {**before.metadata, "general.file_type": 7} == after.metadata
    for old, new in zip(gguf.GGUFReader(model).tensors, gguf.GGUFReader(target).tensors, strict=True):
        assert old.name == new.name
        a, b = (gguf.quants.dequantize(each.data, each.tensor_type) for each in (old, new))
        assert np.abs(a - b).max() < 0.02


def test_a_conversion_takes_the_place_of_what_a_killed_one_left(model: Path, tmp_path: Path) -> None:
    target = tmp_path / "out.gguf"
    (tmp_path / ".out.gguf.999999999.part").write_bytes(b"half")
    convert(model, target, lambda done, total: None)
    assert sorted(each.name for each in tmp_path.iterdir()) == ["out.gguf", "small.gguf"]


@contextmanager
def file_size_max(size: int) -> Iterator[None]:
    """As on a full disk, writing beyond `size` fails."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_no_room_on_the_disk_is_said_and_leaves_nothing_behind(model: Path, tmp_path: Path) -> None:
    target = tmp_path / "cache" / "out.gguf"
    with file_size_max(4096), pytest.raises(EngineBroken, match=r"no room to convert.*Free some space") as caught:
        convert(model, target, lambda done, total: None)
    assert str(target) in str(caught.value)
    assert list(target.parent.iterdir()) == []


def test_a_truncated_source_is_refused_before_anything_is_written(model: Path, tmp_path: Path) -> None:
    model.write_bytes(model.read_bytes()[:-2000])
    target = tmp_path / "cache" / "out.gguf"
    with pytest.raises(EngineBroken, match=r"small\.gguf: truncated"):
        convert(model, target, lambda done, total: None)
    assert not target.parent.exists()
