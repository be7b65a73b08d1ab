"""Estimates the memory of a replica before it runs, from its engine, files and settings.

The engines' own share was measured on the demo models (Linux, PSS of all processes of a replica), and
`tests/engines/sizing/test_measured.py` measures it again.
"""

from collections.abc import Mapping
from math import ceil
from pathlib import Path
from typing import Any, Final

import msgspec

from forebay.core.placement.memory import Architecture, Footprint, Split, gpu_footprint, kv_bytes
from forebay.engines.gguf_header import Header, read_header
from forebay.engines.protocol import EngineBroken
from forebay.engines.sizing.configs import UnknownArchitecture, architecture_of_config
from forebay.engines.sizing.gguf import architecture_of_gguf
from forebay.wire.documents import UNREADABLE

MIB: Final = 1024**2
SHELL_BYTES: Final = 33 * MIB
"""The HTTP process."""
CHILD_BYTES: Final = 33 * MIB
"""A child process with an empty engine."""
LIBRARIES_BYTES: Final = {"llamacpp": 70 * MIB, "openvino": 240 * MIB, "onnx": 80 * MIB, "modelserver": 80 * MIB}
"""Libraries of an engine, with the buffers of a small model. The model server's value is that of `onnx`."""
COPIES: Final = {"openvino": 2.0, "onnx": 2.0, "modelserver": 2.0}
"""Copies of the weights that an engine holds: packed for its kernels besides those of the file. Default: one."""
KV_BITS: Final = {"openvino": 8.5}
"""Bits per element of keys and values; default: 16. OpenVINO uses 8 bits and scales on CPUs unless configured
otherwise.
"""
WEIGHT_FILES: Final = {"openvino": ("openvino_*.bin",), "onnx": ("model.onnx*",)}
"""Files of a folder that an engine loads. Default: all files that look like weights."""
ANY_WEIGHTS: Final = tuple(
    f"**/*.{end}" for end in ("safetensors", "bin", "onnx", "onnx_data", "gguf", "pt", "pt2", "pth")
)


def estimate(engine: str, artifact: str, settings: Mapping[str, int | float | str | bool], gpus: int) -> Footprint:
    """Memory that a replica takes on each of its `gpus`, or with 0 on its node. Never raises.

    Without a readable architecture, keys and values count as 0.
    """
    overhead_bytes = SHELL_BYTES + CHILD_BYTES + LIBRARIES_BYTES.get(engine, 0)
    if engine == "synthetic":
        return Footprint(0, 0, 0 if gpus else overhead_bytes)
    path = Path(artifact)
    try:
        weights, architecture = _read(path, engine, largest=settings.get("load") == "needed")
    except OSError:  # its start will report what is wrong
        weights, architecture = 0, None
    tokens = settings.get("kv_cache_tokens")
    split = Split(tensor=max(gpus, 1))
    kept = 0
    if architecture and isinstance(tokens, int):  # engines allocate the whole cache up front
        kept = kv_bytes(architecture, [tokens], 16 if gpus else KV_BITS.get(engine, 16), split)
    if gpus:
        return gpu_footprint(weights, kept, split)
    return Footprint(ceil(weights * COPIES.get(engine, 1.0)), kept, overhead_bytes)


def _read(path: Path, engine: str, largest: bool) -> tuple[int, Architecture | None]:
    """Bytes of the weights, and the architecture if known.

    `largest`: of a repository that is loaded only in part, count the largest file, as it is unknown which are needed.
    """
    if path.is_dir():
        files = {each for pattern in WEIGHT_FILES.get(engine, ANY_WEIGHTS) for each in path.glob(pattern)}
        sizes = [each.stat().st_size for each in files if each.is_file()]
        return max(sizes, default=0) if largest else sum(sizes), _of_config(path / "config.json")
    if path.suffix.lower() == ".onnx":  # large models keep their weights in files next to it
        return sum(each.stat().st_size for each in path.parent.glob(f"{path.name}*")) or path.stat().st_size, None
    size = path.stat().st_size
    if path.suffix.lower() != ".gguf":
        return size, None
    header = _header(path)
    if header is None:
        return size, None
    try:
        return _tensors_bytes(header, size), architecture_of_gguf(header)
    except UnknownArchitecture:
        return size, None


def _tensors_bytes(header: Header, size: int) -> int:
    """Size of a GGUF file without its header."""
    return size - min((tensor.offset for tensor in header.tensors), default=0)


def _header(path: Path) -> Header | None:
    try:
        return read_header(path)
    except EngineBroken:
        return None


def _of_config(path: Path) -> Architecture | None:
    try:
        config: dict[str, Any] = msgspec.json.decode(path.read_bytes(), type=dict[str, Any])
        return architecture_of_config(config)
    except (OSError, *UNREADABLE, UnknownArchitecture):
        return None
