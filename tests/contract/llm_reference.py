"""A Llama in plain numpy float32 over the dequantised tensors of a GGUF file: the reference for engines."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import gguf
import numpy as np

Array = np.ndarray[Any, np.dtype[np.float32]]


@dataclass
class Reference:
    """Weights and shapes of one model."""

    weights: dict[str, Array]
    tokens: list[bytes]
    layers: int
    heads: int
    kv_heads: int
    rope_base: float
    epsilon: float

    @classmethod
    def load(cls, path: Path) -> "Reference":
        reader = gguf.GGUFReader(path)
        assert reader.fields["general.architecture"].contents() == "llama"
        weights = {
            t.name: gguf.quants.dequantize(t.data, t.tensor_type).reshape(*reversed(t.shape.tolist())).astype("f4")
            for t in reader.tensors
        }

        def of(key: str) -> Any:
            return reader.fields[f"llama.{key}"].contents()

        return cls(
            weights=weights,
            tokens=[token_bytes(text) for text in reader.fields["tokenizer.ggml.tokens"].contents()],
            layers=of("block_count"),
            heads=of("attention.head_count"),
            kv_heads=of("attention.head_count_kv"),
            rope_base=of("rope.freq_base"),
            epsilon=of("attention.layer_norm_rms_epsilon"),
        )

    def logits(self, ids: list[int]) -> Array:
        """The logits after every token of `ids`, all at once: shape (tokens, vocabulary)."""
        w, embedding = self.weights, self.weights["token_embd.weight"]
        x = embedding[ids]
        for n in range(self.layers):
            x = x + self._attention(self._norm(x, f"blk.{n}.attn_norm.weight"), n)
            h = self._norm(x, f"blk.{n}.ffn_norm.weight")
            gate = h @ w[f"blk.{n}.ffn_gate.weight"].T
            up = h @ w[f"blk.{n}.ffn_up.weight"].T
            x = x + (gate / (1 + np.exp(-gate)) * up) @ w[f"blk.{n}.ffn_down.weight"].T
        return self._norm(x, "output_norm.weight") @ w.get("output.weight", embedding).T

    def _norm(self, x: Array, name: str) -> Array:
        return x / np.sqrt((x * x).mean(-1, keepdims=True) + np.float32(self.epsilon)) * self.weights[name]

    def _attention(self, h: Array, n: int) -> Array:
        count = len(h)
        q, k, v = (
            (h @ self.weights[f"blk.{n}.attn_{name}.weight"].T).reshape(count, heads, -1).swapaxes(0, 1)
            for name, heads in (("q", self.heads), ("k", self.kv_heads), ("v", self.kv_heads))
        )
        q, k = self._rotate(q), self._rotate(k)
        k, v = (np.repeat(each, self.heads // self.kv_heads, axis=0) for each in (k, v))
        scores = q @ k.swapaxes(1, 2) / np.sqrt(np.float32(q.shape[-1]))
        scores = np.where(np.tri(count, dtype=bool), scores, np.float32(-np.inf))
        scores = np.exp(scores - scores.max(-1, keepdims=True))
        mixed = (scores / scores.sum(-1, keepdims=True)) @ v
        return mixed.swapaxes(0, 1).reshape(count, -1) @ self.weights[f"blk.{n}.attn_output.weight"].T

    def _rotate(self, x: Array) -> Array:
        """Rotary positions on neighbouring pairs, the layout of GGUF's llama."""
        size = x.shape[-1]
        angles = np.outer(np.arange(x.shape[1]), self.rope_base ** (-np.arange(0, size, 2) / size)).astype("f4")
        even, odd = x[..., ::2], x[..., 1::2]
        turned = np.empty_like(x)
        turned[..., ::2] = even * np.cos(angles) - odd * np.sin(angles)
        turned[..., 1::2] = even * np.sin(angles) + odd * np.cos(angles)
        return turned


def token_bytes(text: str) -> bytes:
    """The bytes of a token as GPT-2 vocabularies write them: one printable character for each byte."""
    return b"".join(bytes([_BYTES[c]]) if c in _BYTES else c.encode() for c in text)


_PRINTABLE = [*range(33, 127), *range(161, 173), *range(174, 256)]
_OTHERS = [each for each in range(256) if each not in _PRINTABLE]
_BYTES = {chr(each): each for each in _PRINTABLE} | {chr(256 + n): each for n, each in enumerate(_OTHERS)}
