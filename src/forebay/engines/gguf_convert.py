"""One-off conversion of GGUF files of types that OpenVINO reads inexactly (Q4_1) to Q8_0."""

import errno
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from forebay.engines.gguf_header import BLOCKS, Header, read_header
from forebay.engines.protocol import EngineBroken

INEXACT = ("Q4_1",)
"""Tensor types that OpenVINO's reader converts inexactly: 0.74 top-1 agreement with f32, 0.96 after conversion."""
ROWS_BYTES_MAX = 32 * 1024 * 1024
"""Part of a tensor that is held as float32 at a time."""

_Q8_0_TYPE = 8
_Q8_0_FILE_TYPE = 7
_F32_TYPE = 0
_Q8_0_BLOCK, _Q8_0_BYTES = BLOCKS[_Q8_0_TYPE][1:]
_NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


def needs_conversion(path: Path) -> bool:
    """Whether OpenVINO would read this GGUF file inexactly. Raises `EngineBroken` if it is invalid or truncated."""
    return any(_inexact(tensor.type) for tensor in read_header(path).tensors)


def convert(source: Path, target: Path, progress: Callable[[int, int], None]) -> None:
    """Write `source` to `target` with inexact tensors as Q8_0; `target` appears atomically.

    `progress` is called with bytes written and bytes in total. Raises `EngineBroken` with the problem and its fix.
    """
    header = read_header(source)
    total = sum(_target_bytes(tensor.type, tensor.shape, tensor.bytes_size or 0) for tensor in header.tensors)
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        if shutil.disk_usage(target.parent).free < total:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        _remove_leftovers(target)
        part = target.with_name(f".{target.name}.{os.getpid()}.part")
        try:
            _write(source, header, part, total, progress)
            os.replace(part, target)
            _sync(target.parent)
        finally:
            part.unlink(missing_ok=True)
    except OSError as error:
        if error.errno in _NO_ROOM:
            raise EngineBroken(
                f"{target}: no room to convert {source}: {total / 1e6:.0f} MB are needed in {target.parent}. "
                "Free some space there, set FOREBAY_HOME to a larger disk, or set `convert: never`."
            ) from error
        raise EngineBroken(f"{target}: cannot convert {source}: {error.strerror or error}") from error


def _inexact(kind: int) -> bool:
    return kind in BLOCKS and BLOCKS[kind][0] in INEXACT


def _target_bytes(kind: int, shape: tuple[int, ...], size: int) -> int:
    if not _inexact(kind):
        return size
    elements = 1
    for length in shape:
        elements *= length
    return elements // _Q8_0_BLOCK * _Q8_0_BYTES if shape[0] % _Q8_0_BLOCK == 0 else elements * 4


def _write(source: Path, header: Header, part: Path, total: int, progress: Callable[[int, int], None]) -> None:
    import gguf

    try:
        reader = gguf.GGUFReader(source)
    except (ValueError, KeyError, IndexError) as error:
        raise EngineBroken(f"{source}: not a usable GGUF model: {error}") from error
    writer = gguf.GGUFWriter(part, header.metadata["general.architecture"])
    try:
        _copy_metadata(reader, writer)
        for tensor in reader.tensors:
            kind, shape = int(tensor.tensor_type), tuple(int(length) for length in tensor.shape)
            size = _target_bytes(kind, shape, tensor.n_bytes)
            if _inexact(kind):
                fits = shape[0] % _Q8_0_BLOCK == 0
                kind = _Q8_0_TYPE if fits else _F32_TYPE
            numpy_shape = tuple(reversed(shape))
            writer.add_tensor_info(
                tensor.name, numpy_shape, np.dtype(np.float32), size, gguf.GGMLQuantizationType(kind)
            )
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_ti_data_to_file()
        _copy_tensors(reader, writer, total, progress)
        writer.flush()
        os.fsync(writer.fout[0].fileno())
    finally:
        writer.close()


def _copy_metadata(reader: Any, writer: Any) -> None:
    for key, field in reader.fields.items():
        if key.startswith("GGUF.") or key == "general.architecture":
            continue
        kind = field.types[0]
        value = _Q8_0_FILE_TYPE if key == "general.file_type" else field.contents()
        if value == []:
            continue  # the writer cannot express an empty array; absent means the same
        writer.add_key_value(key, value, kind, field.types[-1] if len(field.types) > 1 else None)
    writer.data_alignment = reader.alignment


def _copy_tensors(reader: Any, writer: Any, total: int, progress: Callable[[int, int], None]) -> None:
    """Copy tensors a bounded number of rows at a time: the whole model is never in memory."""
    import gguf

    file = writer.fout[0]
    writer.write_padding(file, file.tell())
    done = 0
    for tensor in reader.tensors:
        inexact = _inexact(int(tensor.tensor_type))
        to = gguf.GGMLQuantizationType(_Q8_0_TYPE if int(tensor.shape[0]) % _Q8_0_BLOCK == 0 else _F32_TYPE)
        rows = tensor.data.reshape(-1, tensor.data.shape[-1])
        step = max(1, ROWS_BYTES_MAX // (4 * int(tensor.shape[0])))
        size = 0
        for first in range(0, len(rows), step):
            data = rows[first : first + step]
            if inexact:
                data = gguf.quants.quantize(gguf.quants.dequantize(data, tensor.tensor_type), to)
            file.write(np.ascontiguousarray(data).data)  # unlike `tofile`, it reports why a write failed
            size += data.nbytes
            progress(done + size, total)
        done += size
        writer.write_padding(file, size)


def _remove_leftovers(target: Path) -> None:
    """Remove partial files of earlier conversions that were killed."""
    for part in target.parent.glob(f".{target.name}.*.part"):
        pid = part.suffixes[-2][1:]
        if not (pid.isdigit() and Path("/proc", pid).exists()):
            part.unlink(missing_ok=True)


def _sync(folder: Path) -> None:
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
