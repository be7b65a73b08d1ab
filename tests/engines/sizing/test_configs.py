"""Keys and values of a token, of published models: the shapes are those of their `config.json` on the Hub.

Each section quotes what matters of `https://huggingface.co/REPOSITORY/blob/main/config.json`, for the repository that
the test names. All were compared with published copies in November 2026: where a repository asks for a login, with
those of repositories derived from it (their `_name_or_path` names the original). The configuration classes of
transformers 5.23.0 make the same layers of one of each kind.
"""

from typing import Any

import pytest

from forebay.core.placement.memory import kv_bytes, kv_bytes_per_token
from forebay.engines.sizing.configs import UnknownArchitecture, architecture_of_config

KIB = 1024
GQA = {"num_attention_heads": 32, "num_key_value_heads": 8}
LLAMA_2_7B = {"hidden_size": 4096, "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 32}
LLAMA_2_13B = {"hidden_size": 5120, "num_hidden_layers": 40, "num_attention_heads": 40, "num_key_value_heads": 40}
LLAMA_3_8B = {"hidden_size": 4096, "num_hidden_layers": 32, **GQA}
LLAMA_3_70B = {"hidden_size": 8192, "num_hidden_layers": 80, "num_attention_heads": 64, "num_key_value_heads": 8}
# Early copies of the file say 16; 8 is what it says today, and the paper (arXiv 2407.21783, table 3).
LLAMA_31_405B = {"hidden_size": 16384, "num_hidden_layers": 126, "num_attention_heads": 128, "num_key_value_heads": 8}
MISTRAL_7B = {"hidden_size": 4096, "num_hidden_layers": 32, **GQA, "sliding_window": 4096, "model_type": "mistral"}
QWEN25_14B = {
    "hidden_size": 5120, "num_hidden_layers": 48, "num_attention_heads": 40, "num_key_value_heads": 8,
    "use_sliding_window": False, "sliding_window": 131072, "max_window_layers": 48,
}  # fmt: skip
QWEN3_32B = {
    "hidden_size": 5120, "num_hidden_layers": 64, "num_attention_heads": 64, "num_key_value_heads": 8,
    "head_dim": 128, "sliding_window": None, "use_sliding_window": False,
}  # fmt: skip
QWEN3_235B = {
    "hidden_size": 4096, "num_hidden_layers": 94, "num_attention_heads": 64, "num_key_value_heads": 4,
    "head_dim": 128,
}  # fmt: skip
GPT_OSS_120B = {
    "hidden_size": 2880, "num_hidden_layers": 36, "num_attention_heads": 64, "num_key_value_heads": 8, "head_dim": 64,
    "sliding_window": 128, "layer_types": ["sliding_attention", "full_attention"] * 18,
}  # fmt: skip
DEEPSEEK_V3 = {
    "hidden_size": 7168, "num_hidden_layers": 61, "num_attention_heads": 128, "num_key_value_heads": 128,
    "kv_lora_rank": 512, "qk_rope_head_dim": 64, "qk_nope_head_dim": 128, "v_head_dim": 128,
}  # fmt: skip
GEMMA_2_9B = {
    "hidden_size": 3584, "num_hidden_layers": 42, "num_attention_heads": 16, "num_key_value_heads": 8,
    "head_dim": 256, "sliding_window": 4096, "model_type": "gemma2",
}  # fmt: skip
GEMMA_3_27B = {
    "model_type": "gemma3",
    "text_config": {
        "hidden_size": 5376, "num_hidden_layers": 62, "num_attention_heads": 32, "num_key_value_heads": 16,
        "head_dim": 128, "sliding_window": 1024, "model_type": "gemma3_text",
    },
}  # fmt: skip
GEMMA_3_12B = {
    "model_type": "gemma3",
    "text_config": {
        "hidden_size": 3840, "num_hidden_layers": 48, "num_attention_heads": 16, "num_key_value_heads": 8,
        "sliding_window": 1024, "model_type": "gemma3_text",
    },
}  # fmt: skip
GEMMA_3_4B = {
    "model_type": "gemma3",
    "text_config": {
        "hidden_size": 2560, "num_hidden_layers": 34, "sliding_window": 1024, "model_type": "gemma3_text",
    },
}  # fmt: skip
LLAMA_4_SCOUT = {
    "model_type": "llama4",
    "text_config": {
        "hidden_size": 5120, "num_hidden_layers": 48, "num_attention_heads": 40, "num_key_value_heads": 8,
        "head_dim": 128, "attention_chunk_size": 8192, "no_rope_layers": [], "model_type": "llama4_text",
    },
}  # fmt: skip
SMOLLM2_135M = {"hidden_size": 576, "num_hidden_layers": 30, "num_attention_heads": 9, "num_key_value_heads": 3}
JAMBA = {
    "hidden_size": 4096, "num_hidden_layers": 32, **GQA, "sliding_window": None,
    "attn_layer_period": 8, "attn_layer_offset": 4, "mamba_d_conv": 4, "mamba_d_state": 16, "mamba_expand": 2,
}  # fmt: skip


@pytest.mark.parametrize(
    ("config", "per_token", "at_8192"),
    [
        pytest.param(LLAMA_2_7B, 512 * KIB, None, id="meta-llama/Llama-2-7b-hf"),
        pytest.param(LLAMA_2_13B, 800 * KIB, None, id="meta-llama/Llama-2-13b-hf"),
        pytest.param(LLAMA_3_8B, 128 * KIB, None, id="meta-llama/Meta-Llama-3-8B"),
        pytest.param(LLAMA_3_70B, 320 * KIB, None, id="meta-llama/Meta-Llama-3-70B"),
        pytest.param(LLAMA_31_405B, 504 * KIB, None, id="meta-llama/Llama-3.1-405B"),
        pytest.param(MISTRAL_7B, 128 * KIB, 4096 * 128 * KIB, id="mistralai/Mistral-7B-v0.1"),
        pytest.param(QWEN25_14B, 192 * KIB, None, id="Qwen/Qwen2.5-14B"),
        pytest.param(QWEN3_32B, 256 * KIB, None, id="Qwen/Qwen3-32B"),
        pytest.param(QWEN3_235B, 188 * KIB, None, id="Qwen/Qwen3-235B-A22B"),
        pytest.param(GPT_OSS_120B, 72 * KIB, (8192 + 128) * 36 * KIB, id="openai/gpt-oss-120b"),
        pytest.param(DEEPSEEK_V3, 61 * 1152, None, id="deepseek-ai/DeepSeek-V3"),
        pytest.param(GEMMA_2_9B, 336 * KIB, (8192 + 4096) * 168 * KIB, id="google/gemma-2-9b"),
        pytest.param(GEMMA_3_27B, 496 * KIB, (8192 * 10 + 1024 * 52) * 8 * KIB, id="google/gemma-3-27b-it"),
        pytest.param(GEMMA_3_12B, 384 * KIB, (8192 * 8 + 1024 * 40) * 8 * KIB, id="google/gemma-3-12b-it"),
        pytest.param(GEMMA_3_4B, 136 * KIB, (8192 * 5 + 1024 * 29) * 4 * KIB, id="google/gemma-3-4b-it"),
        pytest.param(LLAMA_4_SCOUT, 192 * KIB, None, id="meta-llama/Llama-4-Scout-17B-16E-Instruct"),
        pytest.param(SMOLLM2_135M, 23_040, None, id="HuggingFaceTB/SmolLM2-135M-Instruct"),
    ],
)
def test_keys_and_values_of_published_models(config: dict[str, Any], per_token: int, at_8192: int | None) -> None:
    found = architecture_of_config(config)
    assert kv_bytes_per_token(found) == per_token
    assert kv_bytes(found, [8192]) == (at_8192 or 8192 * per_token)


def test_recurrent_layers_keep_a_state_and_no_tokens() -> None:
    """Jamba: 4 GB of keys and values for 256 thousand tokens, says its paper (arXiv 2403.19887, table 1)."""
    found = architecture_of_config(JAMBA)
    state = 28 * 8192 * (16 + 4) * 2
    assert kv_bytes(found, [262_144]) == 4 * KIB**3 + state
    listed = {
        **JAMBA,
        "attn_layer_period": 0,
        "layers_block_type": ["mamba", "attention"] * 2,
        "num_hidden_layers": 4,
    }
    assert kv_bytes_per_token(architecture_of_config(listed)) == 8 * KIB
    patterned = {
        "hidden_size": 4096, "num_hidden_layers": 5, **GQA, "hybrid_override_pattern": "M-M*E", "conv_kernel": 4,
        "mamba_num_heads": 128, "mamba_head_dim": 64, "ssm_state_size": 128, "n_groups": 8,
    }  # fmt: skip
    two = 2 * (8192 * 128 + (8192 + 2 * 8 * 128) * 4)
    assert kv_bytes(architecture_of_config(patterned), [1]) == 4 * KIB + two * 2


def test_a_gated_delta_rule_keeps_a_matrix_for_each_head() -> None:
    """Qwen/Qwen3-Next-80B-A3B-Instruct: every fourth of 48 layers is attention with 2 heads of 256."""
    config = {
        "hidden_size": 2048, "num_hidden_layers": 48, "num_attention_heads": 16, "num_key_value_heads": 2,
        "head_dim": 256, "layer_types": (["linear_attention"] * 3 + ["full_attention"]) * 12,
        "linear_num_value_heads": 32, "linear_num_key_heads": 16, "linear_key_head_dim": 128,
        "linear_value_head_dim": 128, "linear_conv_kernel_dim": 4,
    }  # fmt: skip
    found = architecture_of_config(config)
    assert kv_bytes_per_token(found) == 24 * KIB
    assert kv_bytes(found, [0]) == 36 * (32 * 128 * 128 + 8192 * 3) * 2
    shorter = {**config, "layer_types": None, "full_attention_interval": 4}
    assert architecture_of_config(shorter) == found


def test_an_encoder_is_looked_at_by_every_layer_of_the_decoder() -> None:
    """openai/whisper-large-v3."""
    config = {
        "is_encoder_decoder": True, "d_model": 1280, "decoder_layers": 32, "decoder_attention_heads": 20,
        "max_source_positions": 1500, "num_hidden_layers": 32,
    }  # fmt: skip
    assert kv_bytes(architecture_of_config(config), [448]) == (1500 + 448) * 160 * KIB


def test_pictures_are_looked_at_by_some_layers_instead_of_the_text() -> None:
    """meta-llama/Llama-3.2-11B-Vision: 8 of 40 layers look at 4 tiles of (560 / 14)² + 1 patches."""
    config = {
        "text_config": {"hidden_size": 4096, "num_hidden_layers": 40, **GQA,
                        "cross_attention_layers": [3, 8, 13, 18, 23, 28, 33, 38]},
        "vision_config": {"image_size": 560, "patch_size": 14, "max_num_tiles": 4},
    }  # fmt: skip
    found = architecture_of_config(config)
    assert kv_bytes_per_token(found) == 128 * KIB
    assert kv_bytes(found, [1000]) == 1000 * 128 * KIB + 6404 * 32 * KIB


@pytest.mark.parametrize(
    ("change", "per_token"),
    [
        ({"num_key_value_heads": None, "multi_query": True}, 16 * KIB),
        ({"num_key_value_heads": None}, 512 * KIB),
        ({"use_sliding_window": True, "sliding_window": 64, "max_window_layers": 28}, 128 * KIB),
        ({"sliding_window": 64, "sliding_window_pattern": 4}, 128 * KIB),
    ],
)
def test_what_is_left_out_means_what_transformers_takes_it_for(change: dict[str, Any], per_token: int) -> None:
    assert kv_bytes_per_token(architecture_of_config({**LLAMA_3_8B, **change})) == per_token


def test_windows_of_the_last_layers_and_of_patterns_are_counted() -> None:
    last = architecture_of_config(
        {**LLAMA_3_8B, "use_sliding_window": True, "sliding_window": 64, "max_window_layers": 28}
    )
    assert kv_bytes(last, [1000]) == (28 * 1000 + 4 * 64) * 4 * KIB
    pattern = architecture_of_config({**LLAMA_3_8B, "sliding_window": 64, "sliding_window_pattern": 4})
    assert kv_bytes(pattern, [1000]) == (8 * 1000 + 24 * 64) * 4 * KIB


def test_far_back_a_chunk_is_forgotten_and_shared_layers_are_kept_once() -> None:
    assert kv_bytes(architecture_of_config(LLAMA_4_SCOUT), [100_000]) == (12 * 100_000 + 36 * 8192) * 4 * KIB
    shared = architecture_of_config({**LLAMA_3_8B, "num_kv_shared_layers": 15})
    assert kv_bytes_per_token(shared) == 17 * 4 * KIB


@pytest.mark.parametrize(
    ("config", "said"),
    [
        ({}, "how many layers"),
        ({"num_hidden_layers": 2}, "how many heads"),
        ({"num_hidden_layers": 2, "num_attention_heads": 2}, "how many heads"),
        ({**LLAMA_3_8B, "layer_types": ["dream"]}, "layers of the kind 'dream' are not known"),
    ],
)
def test_a_file_that_does_not_say_enough_is_no_guess(config: dict[str, Any], said: str) -> None:
    with pytest.raises(UnknownArchitecture, match=said):
        architecture_of_config(config)
