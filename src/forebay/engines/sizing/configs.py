"""Architectures from the `config.json` of models on the Hugging Face Hub.

The keys are those of published files, of which the tests quote one of each kind; defaults follow the library
`transformers`.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any, Final

from forebay.core.placement.memory import Architecture, Layers

PATTERNS: Final = {"gemma2": 2, "gemma3_text": 6, "gemma3": 6, "cohere2": 4, "llama4_text": 4}
"""Models in which every n-th layer has full attention, where their file does not say so."""
LEFT_OUT: Final = {
    "gemma3_text": {"num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 256, "sliding_window": 4096}
}
"""Values omitted in published files because they are `transformers` defaults: Gemma 3 with 4 and 12 billion
parameters.
"""
KINDS: Final = {
    "full_attention": "full",
    "attention": "full",
    "sliding_attention": "window",
    "chunked_attention": "window",
    "linear_attention": "state",
    "mamba": "state",
    "*": "full",
    "M": "state",
    "-": "none",
    "E": "none",
    "mlp": "none",
    "moe": "none",
}
"""Names of layer kinds."""


class UnknownArchitecture(Exception):  # noqa: N818 - states the condition
    """A file lacks what is needed to estimate the memory; the text says what."""


def architecture_of_config(config: Mapping[str, Any]) -> Architecture:
    """The architecture described by a `config.json`. Raises `UnknownArchitecture`."""
    inner = config.get("text_config")
    text = {**config, **inner} if isinstance(inner, Mapping) else config
    text = {**LEFT_OUT.get(str(text.get("model_type")), {}), **text}
    count = _number(text, "decoder_layers", "num_decoder_layers", "num_hidden_layers", "n_layer", "num_layers")
    if not count:
        raise UnknownArchitecture("it does not say how many layers the model has")
    attention = _attention(text)
    # the last layers share the KV cache of others
    kinds = _kinds(text, count)[: count - _number(text, "num_kv_shared_layers")]
    window = _number(text, "sliding_window", "attention_chunk_size", "sliding_window_size")
    counted = Counter(kinds)
    crossing = text.get("cross_attention_layers")
    encoder = _encoder_tokens(text)
    if isinstance(crossing, Sequence):  # replaces self-attention in these layers
        counted["full"] -= len(crossing)
    layers = [
        _with(attention, counted["full"]),
        _with(attention, counted["window"], window_tokens=window),
        Layers(counted["state"], state_dim=_state_dim(text)),
        _with(attention, len(crossing) if isinstance(crossing, Sequence) else count, encoder_tokens=encoder),
    ]
    return Architecture(tuple(x for x in layers[:3] if x.count) + ((layers[3],) if encoder else ()))


def _with(one: Layers, count: int, window_tokens: int | None = None, encoder_tokens: int = 0) -> Layers:
    dims = one.kv_heads, one.key_dim, one.value_dim, one.latent_dim
    return Layers(count, *dims, window_tokens=window_tokens, encoder_tokens=encoder_tokens)


def _attention(text: Mapping[str, Any]) -> Layers:
    """One attention layer."""
    latent = _number(text, "kv_lora_rank")
    if latent:
        return Layers(1, latent_dim=latent + _number(text, "qk_rope_head_dim"))
    heads = _number(text, "decoder_attention_heads", "num_attention_heads", "n_head", "num_heads")
    hidden = _number(text, "hidden_size", "d_model", "n_embd")
    dim = _number(text, "head_dim", "attention_head_dim", "d_kv") or (hidden // heads if heads else 0)
    if not heads or not dim:
        raise UnknownArchitecture("it does not say how many heads of attention the model has, or of what size")
    kv_heads = _number(text, "num_key_value_heads", "num_kv_heads") or (1 if text.get("multi_query") else heads)
    return Layers(1, kv_heads, dim, _number(text, "v_head_dim") or dim)


def _kinds(text: Mapping[str, Any], count: int) -> list[str]:
    """The kind of each layer."""
    listed = text.get("layer_types") or text.get("layers_block_type") or text.get("hybrid_override_pattern")
    if listed:
        unknown = sorted({str(word) for word in listed} - set(KINDS))
        if unknown:
            raise UnknownArchitecture(f"layers of the kind {unknown[0]!r} are not known")
        return [KINDS[word] for word in listed]
    period, offset = _number(text, "attn_layer_period"), _number(text, "attn_layer_offset")
    if period:
        return ["full" if index % period == offset else "state" for index in range(count)]
    interval = _number(text, "full_attention_interval")
    if interval:
        return ["state" if (index + 1) % interval else "full" for index in range(count)]
    if not _number(text, "sliding_window", "attention_chunk_size") or text.get("use_sliding_window") is False:
        return ["full"] * count
    pattern = _number(text, "sliding_window_pattern") or PATTERNS.get(str(text.get("model_type")), 0)
    if pattern:
        return ["window" if (index + 1) % pattern else "full" for index in range(count)]
    first = _number(text, "max_window_layers") if text.get("use_sliding_window") else 0
    return ["full"] * min(first, count) + ["window"] * max(count - first, 0)


def _state_dim(text: Mapping[str, Any]) -> int:
    """Elements of a recurrent layer's state, convolution included; 0: the file does not say."""
    heads = _number(text, "linear_num_value_heads")
    if heads:  # gated delta rule: a matrix per head
        key, value = _number(text, "linear_key_head_dim"), _number(text, "linear_value_head_dim")
        channels = 2 * _number(text, "linear_num_key_heads") * key + heads * value
        return heads * key * value + channels * (_number(text, "linear_conv_kernel_dim") - 1)
    conv, state = _number(text, "mamba_d_conv", "conv_kernel"), _number(text, "mamba_d_state", "ssm_state_size")
    grouped = _number(text, "mamba_n_heads", "mamba_num_heads") * _number(text, "mamba_d_head", "mamba_head_dim")
    inner = grouped or _number(text, "mamba_expand", "expand") * _number(text, "hidden_size")
    groups = _number(text, "mamba_n_groups", "n_groups") if grouped else 0
    return inner * state + (inner + 2 * groups * state) * conv


def _encoder_tokens(text: Mapping[str, Any]) -> int:
    """Encoder tokens that the decoder attends to; 0: there is no encoder."""
    if text.get("is_encoder_decoder"):
        return _number(text, "max_source_positions", "n_positions", "max_position_embeddings")
    vision = text.get("vision_config")
    if isinstance(vision, Mapping) and text.get("cross_attention_layers"):
        patches = (_number(vision, "image_size") // max(_number(vision, "patch_size"), 1)) ** 2 + 1
        return patches * max(_number(vision, "max_num_tiles"), 1)
    return 0


def _number(section: Mapping[str, Any], *keys: str) -> int:
    """The first of these values that is an integer; 0: none is."""
    for key in keys:
        value = section.get(key)
        if isinstance(value, int) and not isinstance(value, bool):
            return value
    return 0
