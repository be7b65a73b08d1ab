"""Bytes of weights, keys and values, against figures that are published or follow from published shapes."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from forebay.core.placement.memory import (
    GPU_OVERHEAD_BYTES,
    NCCL_BYTES,
    Architecture,
    Footprint,
    Layers,
    Split,
    gpu_footprint,
    kv_bytes,
    kv_bytes_per_token,
)

KIB = 1024
LLAMA_70B = Architecture((Layers(80, 8, 128, 128),))
LATENT = Architecture((Layers(61, latent_dim=576),))
WINDOWED = Architecture((Layers(18, 8, 64, 64), Layers(18, 8, 64, 64, window_tokens=128)))
HYBRID = Architecture((Layers(4, 8, 128, 128), Layers(28, state_dim=8192 * 20)))


@pytest.mark.parametrize(
    ("architecture", "split", "expected"),
    [
        (LLAMA_70B, Split(), 320 * KIB),
        (LLAMA_70B, Split(tensor=4), 80 * KIB),
        (LLAMA_70B, Split(tensor=16), 40 * KIB),  # one head each, and each head twice
        (LLAMA_70B, Split(tensor=8, pipeline=2), 20 * KIB),
        (LATENT, Split(), 70_272),
        (LATENT, Split(tensor=8), 70_272),
        (WINDOWED, Split(), 72 * KIB),
        (HYBRID, Split(), 16 * KIB),
    ],
)
def test_kv_bytes_per_token_follow_from_heads_dimensions_and_split(
    architecture: Architecture, split: Split, expected: int
) -> None:
    assert kv_bytes_per_token(architecture, split=split) == expected
    assert kv_bytes_per_token(architecture, 8, split) * 2 == expected


def test_sliding_window_bounds_kv_bytes_and_recurrent_state_is_constant() -> None:
    full = 18 * 2 * 8 * 64 * 2
    assert kv_bytes(WINDOWED, [100]) == 200 * full
    assert kv_bytes(WINDOWED, [1000]) == (1000 + 128) * full
    state = 28 * 8192 * 20 * 2
    assert kv_bytes(HYBRID, [0]) == state
    assert kv_bytes(HYBRID, [10, 20]) == 30 * 16 * KIB + 2 * state
    assert kv_bytes(HYBRID, [0], split=Split(tensor=2), state_bits=32) == state


def test_encoder_tokens_are_cached_once_for_any_answer_length() -> None:
    reader = Architecture((Layers(32, 20, 64, 64), Layers(32, 20, 64, 64, encoder_tokens=1500)))
    assert kv_bytes_per_token(reader) == 160 * KIB
    assert kv_bytes(reader, [1]) == 1501 * 160 * KIB
    assert kv_bytes(reader, [448]) == 1948 * 160 * KIB


def test_gpu_footprint_is_its_share_of_weights_plus_cache_and_overhead() -> None:
    assert gpu_footprint(1000, 10) == Footprint(1000, 10, GPU_OVERHEAD_BYTES)
    assert gpu_footprint(1000, 10, Split(2, 2)) == Footprint(250, 10, GPU_OVERHEAD_BYTES + NCCL_BYTES)
    assert gpu_footprint(1000, 10).total_bytes == 1010 + GPU_OVERHEAD_BYTES


@given(st.integers(1, 9), st.integers(1, 64), st.integers(1, 4), st.lists(st.integers(0, 5000), max_size=4))
def test_more_gpus_never_increase_kv_bytes_per_gpu_nor_decrease_the_sum(
    layers: int, heads: int, gpus: int, tokens: list[int]
) -> None:
    model = Architecture((Layers(layers, heads, 64, 64, window_tokens=512), Layers(2, heads, 64, 64)))
    alone, shared = kv_bytes(model, tokens), kv_bytes(model, tokens, split=Split(tensor=gpus))
    assert shared <= alone <= shared * gpus
