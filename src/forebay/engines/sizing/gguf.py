"""Architectures from GGUF headers, whose keys llama.cpp defines (docs/gguf.md of ggml)."""

from collections import Counter
from math import prod
from typing import Any, Final

from forebay.core.placement.memory import Architecture, Layers
from forebay.engines.gguf_header import Header
from forebay.engines.sizing.configs import UnknownArchitecture

PATTERNS: Final = {"gemma2": 2, "gemma3": 6, "gpt-oss": 2, "cohere2": 4}
"""Architectures in which every n-th layer has full attention: known to llama.cpp, absent in the file."""


def architecture_of_gguf(header: Header) -> Architecture:
    """The architecture of a GGUF file. Raises `UnknownArchitecture`."""
    count = _number(header.of_model("block_count"))
    heads = header.of_model("attention.head_count_kv") or header.of_model("attention.head_count")
    each = list(heads) if isinstance(heads, list) else [heads] * count
    if not count or len(each) != count or not all(isinstance(h, int) for h in each):
        raise UnknownArchitecture("it does not say how many layers and heads the model has")
    latent, key, value = _dims(header)
    kept = Counter(zip(each, _windows(header, count), strict=True))
    layers = []
    for (kv_heads, window), number in sorted(kept.items(), key=lambda item: (item[0][0], item[0][1] or 0)):
        if not kv_heads:
            layers.append(Layers(number, state_dim=_state_dim(header)))
        elif latent:
            layers.append(Layers(number, latent_dim=latent, window_tokens=window))
        else:
            layers.append(Layers(number, kv_heads, key, value, window_tokens=window))
    return Architecture(tuple(layers), sum(prod(tensor.shape) for tensor in header.tensors))


def _dims(header: Header) -> tuple[int, int, int]:
    """Elements of the latent vector, and of a head's key and value."""
    latent = _number(header.of_model("attention.kv_lora_rank"))
    if latent:
        return latent + _number(header.of_model("rope.dimension_count")), 0, 0
    heads = header.of_model("attention.head_count")
    heads = max(heads) if isinstance(heads, list) else _number(heads)
    usual = _number(header.of_model("embedding_length")) // max(heads, 1)
    key = _number(header.of_model("attention.key_length")) or usual
    return 0, key, _number(header.of_model("attention.value_length")) or usual


def _windows(header: Header, count: int) -> list[int | None]:
    """Attention window of each layer; None: full attention."""
    window = _number(header.of_model("attention.sliding_window"))
    if not window:
        return [None] * count
    pattern = header.of_model("attention.sliding_window_pattern")
    if isinstance(pattern, list):
        return [window if index < len(pattern) and pattern[index] else None for index in range(count)]
    every = _number(pattern) or PATTERNS.get(str(header.metadata.get("general.architecture")), 0)
    return [window if not every or (index + 1) % every else None for index in range(count)]


def _state_dim(header: Header) -> int:
    inner, state = _number(header.of_model("ssm.inner_size")), _number(header.of_model("ssm.state_size"))
    groups = _number(header.of_model("ssm.group_count"))
    return inner * state + (inner + 2 * groups * state) * max(_number(header.of_model("ssm.conv_kernel")) - 1, 0)


def _number(value: Any) -> int:
    return value if isinstance(value, int) and not isinstance(value, bool) else 0
