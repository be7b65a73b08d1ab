"""How much memory a language model takes: weights, keys and values of attention, state, overhead. Sizes are bytes.

Of keys and values a layer keeps `kv_heads * (key_dim + value_dim)` elements for each token: as many heads as queries
(multi-head attention), fewer (grouped-query attention, Ainslie et al. 2023), or one (multi-query). Latent attention
keeps one compressed vector for all heads (DeepSeek-V2, section 2.1). A sliding window keeps no more than its tokens,
recurrent layers the same state for any length. Tensor parallelism divides heads, at least one a GPU, but no latent
vector; pipeline parallelism divides layers.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from math import ceil
from typing import Final, NamedTuple

GPU_OVERHEAD_BYTES: Final = 2 * 10**9
"""Context, kernels, activations and captured graphs on each GPU; servers differ between 1 and 4 GB."""
NCCL_BYTES: Final = 4 * 10**8
"""More on each GPU of a group: 342 to 392 MB of buffers were seen on H200 (NVIDIA AIConfigurator's system data)."""


@dataclass(frozen=True, slots=True)
class Layers:
    """Layers that are alike. One of attention has heads or a latent vector, a recurrent one a state."""

    count: int
    kv_heads: int = 0
    key_dim: int = 0
    """Elements of one head's key."""
    value_dim: int = 0
    latent_dim: int = 0
    """Elements of the vector that stands for keys and values of all heads, with its part for positions."""
    window_tokens: int | None = None
    """How far back it looks; None: to the beginning."""
    state_dim: int = 0
    """Elements of the state of a sequence, whatever its length."""
    encoder_tokens: int = 0
    """Its keys and values are of so many tokens of an encoder, and not of those that are generated."""


@dataclass(frozen=True, slots=True)
class Architecture:
    """What of a model decides over its memory."""

    layers: tuple[Layers, ...]
    parameters: int = 0
    """0: unknown."""


class Split(NamedTuple):
    """Over how many GPUs a replica is divided."""

    tensor: int = 1
    pipeline: int = 1


class Footprint(NamedTuple):
    """What a replica takes, on each of its GPUs or of the memory of its node."""

    weights_bytes: int = 0
    kv_bytes: int = 0
    overhead_bytes: int = 0

    @property
    def total_bytes(self) -> int:
        """All of it."""
        return sum(self)


ALONE: Final = Split()


def kv_bytes_per_token(architecture: Architecture, kv_bits: float = 16, split: Split = ALONE) -> int:
    """Keys and values of a token within all windows, on the GPU that has most of them."""
    dims = sum(_token_dim(layers, split) for layers in architecture.layers if not layers.encoder_tokens)
    return ceil(dims * kv_bits / 8)


def kv_bytes(
    architecture: Architecture,
    tokens: Sequence[int],
    kv_bits: float = 16,
    split: Split = ALONE,
    state_bits: float = 16,
) -> int:
    """All that sequences of so many tokens each keep at their longest, on the GPU that has most of it."""
    kept = states = 0
    for layers in architecture.layers:
        for length in tokens:
            kept += _token_dim(layers, split) * _kept_tokens(layers, length)
        states += ceil(layers.count / split.pipeline) * ceil(layers.state_dim / split.tensor) * len(tokens)
    return ceil(kept * kv_bits / 8) + ceil(states * state_bits / 8)


def gpu_footprint(weights_bytes: int, kv_bytes: int, split: Split = ALONE) -> Footprint:
    """What a replica takes on each of its GPUs: weights in equal parts, `kv_bytes` of one GPU."""
    gpus = split.tensor * split.pipeline
    overhead_bytes = GPU_OVERHEAD_BYTES + (NCCL_BYTES if gpus > 1 else 0)
    return Footprint(ceil(weights_bytes / gpus), kv_bytes, overhead_bytes)


def _token_dim(layers: Layers, split: Split) -> int:
    """Elements that one GPU keeps of a token in these layers."""
    heads = ceil(layers.kv_heads / split.tensor)  # with more GPUs than heads each still has one: they are copied
    return ceil(layers.count / split.pipeline) * (heads * (layers.key_dim + layers.value_dim) + layers.latent_dim)


def _kept_tokens(layers: Layers, length: int) -> int:
    if layers.encoder_tokens:
        return layers.encoder_tokens
    return length if layers.window_tokens is None else min(length, layers.window_tokens)
