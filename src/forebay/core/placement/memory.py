"""Memory of a language model: weights, KV cache, recurrent state, overhead. Sizes are bytes.

Per token, a layer caches `kv_heads * (key_dim + value_dim)` elements: as many heads as queries (multi-head
attention), fewer (grouped-query attention, Ainslie et al. 2023), or one (multi-query). Latent attention caches one
compressed vector for all heads (DeepSeek-V2, section 2.1). A sliding window caches no more than its tokens, recurrent
layers have a constant state for any length. Tensor parallelism divides heads, with at least one per GPU, but not
latent vectors; pipeline parallelism divides layers.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from math import ceil
from typing import Final, NamedTuple

GPU_OVERHEAD_BYTES: Final = 2 * 10**9
"""Context, kernels, activations and captured graphs on each GPU; servers range between 1 and 4 GB."""
NCCL_BYTES: Final = 4 * 10**8
"""Additional on each GPU of a group: 342 to 392 MB of buffers were measured on H200 (NVIDIA AIConfigurator's system
data)."""


@dataclass(frozen=True, slots=True)
class Layers:
    """A group of identical layers. Attention layers have heads or a latent vector, recurrent ones a state."""

    count: int
    kv_heads: int = 0
    key_dim: int = 0
    """Elements of one head's key."""
    value_dim: int = 0
    latent_dim: int = 0
    """Elements of the compressed vector for keys and values of all heads, including its positional part."""
    window_tokens: int | None = None
    """Size of the sliding window; None: unlimited."""
    state_dim: int = 0
    """Elements of a sequence's recurrent state, whatever its length."""
    encoder_tokens: int = 0
    """Cross-attention: keys and values are of this many encoder tokens, not of generated ones."""


@dataclass(frozen=True, slots=True)
class Architecture:
    """The properties of a model that determine its memory."""

    layers: tuple[Layers, ...]
    parameters: int = 0
    """0: unknown."""


class Split(NamedTuple):
    """How many GPUs a replica is divided over."""

    tensor: int = 1
    pipeline: int = 1


class Footprint(NamedTuple):
    """Memory of a replica, on each of its GPUs or on its node."""

    weights_bytes: int = 0
    kv_bytes: int = 0
    overhead_bytes: int = 0

    @property
    def total_bytes(self) -> int:
        """The sum."""
        return sum(self)


ALONE: Final = Split()


def kv_bytes_per_token(architecture: Architecture, kv_bits: float = 16, split: Split = ALONE) -> int:
    """KV cache per token (within all windows), on the GPU that has the most."""
    dims = sum(_token_dim(layers, split) for layers in architecture.layers if not layers.encoder_tokens)
    return ceil(dims * kv_bits / 8)


def kv_bytes(
    architecture: Architecture,
    tokens: Sequence[int],
    kv_bits: float = 16,
    split: Split = ALONE,
    state_bits: float = 16,
) -> int:
    """KV cache and state of sequences at their full lengths (`tokens`), on the GPU that has the most."""
    kept = states = 0
    for layers in architecture.layers:
        for length in tokens:
            kept += _token_dim(layers, split) * _kept_tokens(layers, length)
        states += ceil(layers.count / split.pipeline) * ceil(layers.state_dim / split.tensor) * len(tokens)
    return ceil(kept * kv_bits / 8) + ceil(states * state_bits / 8)


def gpu_footprint(weights_bytes: int, kv_bytes: int, split: Split = ALONE) -> Footprint:
    """Memory on each GPU of a replica: weights in equal parts, `kv_bytes` per GPU."""
    gpus = split.tensor * split.pipeline
    overhead_bytes = GPU_OVERHEAD_BYTES + (NCCL_BYTES if gpus > 1 else 0)
    return Footprint(ceil(weights_bytes / gpus), kv_bytes, overhead_bytes)


def _token_dim(layers: Layers, split: Split) -> int:
    """Elements per token that one GPU caches for these layers."""
    heads = ceil(layers.kv_heads / split.tensor)  # with more GPUs than heads, heads are replicated
    return ceil(layers.count / split.pipeline) * (heads * (layers.key_dim + layers.value_dim) + layers.latent_dim)


def _kept_tokens(layers: Layers, length: int) -> int:
    if layers.encoder_tokens:
        return layers.encoder_tokens
    return length if layers.window_tokens is None else min(length, layers.window_tokens)
