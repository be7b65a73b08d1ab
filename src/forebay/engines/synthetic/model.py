"""What the synthetic engine generates: tokens, next words, smallest instances of JSON Schemas. Pure functions."""

import math
import re
import zlib
from array import array
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import jsonschema
import msgspec
import referencing

from forebay.core.errors import Code, Refusal
from forebay.engines.protocol import Sampling, TokenLogprob

VOCABULARY = 65_536
END_ODDS = 96
"""After any of our words, an answer ends with a probability of one in this many."""
LOGIT_TOP, LOGIT_STEP = 16.0, 0.5
SCHEMA_DEPTH_MAX = 32
SCHEMA_NODES_MAX = 4096
UNUSABLE = (
    msgspec.DecodeError, referencing.exceptions.Unresolvable, ValueError, ArithmeticError, RecursionError,
    TypeError, AttributeError,
)  # fmt: skip
"""What a schema that is no plain one raises; the last two where a `$ref` leads to what is no schema at all."""
WORDS = (
    " the", " water", " of", " a", " river", " fills", " pool", " and", " runs", " to", " wheel", " that", " turns",
    " in", " stone", " house", " where", " steady", " light", " is", " made", " for", " town", " by", " night",
    " it", " rests", " until", " rain", " comes", " down", " hills",
)  # fmt: skip
"""All words that it can generate; each is one token."""

PIECE_BYTES_MAX = 25
_PIECE = re.compile(r" ?\w{1,6}|\W")
_MASK = 2**64 - 1


def pieces(text: str) -> list[str]:
    """Split a text into its tokens."""
    return _PIECE.findall(text)


def encode(text: str) -> tuple[int, ...]:
    """The token ids of a text. Not reversible in general: `decode` knows the words above and single characters."""
    return tuple(zlib.crc32(piece.encode()) % VOCABULARY for piece in pieces(text))


WORD_IDS = tuple(encode(word)[0] for word in WORDS)
_KNOWN = {encode(piece)[0]: piece for piece in (*map(chr, range(0x7F)), *WORDS)}
_RANK_LOGITS = tuple(LOGIT_TOP - LOGIT_STEP * rank for rank in range(len(WORDS)))
_LOG_TOTAL = math.log(sum(math.exp(logit) for logit in _RANK_LOGITS))


def decode(ids: tuple[int, ...]) -> str:
    """The text of token ids; � for each that is neither one of our words nor an ASCII character."""
    return "".join([_KNOWN.get(id, "�") for id in ids])


def count_words(text: str) -> Counter[int]:
    """How often each of our words occurs as a token, by index."""
    return Counter(WORDS.index(piece) for piece in pieces(text) if piece in WORDS)


def roll(state: int, ids: tuple[int, ...]) -> int:
    """The state after more tokens. Rolling in two parts or at once gives the same result."""
    return zlib.crc32(array("I", ids).tobytes(), state)


def mix(*parts: int) -> int:
    """A well-mixed 64-bit number (the finalizer of splitmix64)."""
    value = 0
    for part in parts:
        value = ((value ^ part) + 0x9E3779B97F4A7C15) & _MASK
        value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
        value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & _MASK
        value ^= value >> 31
    return value


def chance(id: str) -> float:
    """A number from 0 to 1 that replaces randomness for a request."""
    return mix(roll(0, encode(id)), 3) / 2**64


def ends(state: int, last_id: int) -> bool:
    """Whether an answer ends here."""
    return last_id in WORD_IDS and mix(state, 1) % END_ODDS == 0


def order(state: int) -> list[int]:
    """The indexes of all words, likeliest first."""
    noise, count = mix(state), len(WORDS)
    return [(rank * (noise | 1) + (noise >> 32)) % count for rank in range(count)]


def next_word(state: int, sampling: Sampling, seed: int, said: Mapping[int, int], prompt_ids: frozenset[int]) -> int:
    """The index of the next word. `said` counts the words of the answer by index."""
    penalised = _penalised(sampling)
    words = order(state)
    if sampling.temperature == 0 and not penalised:
        return words[0]
    ranked = list(zip(_RANK_LOGITS, words, strict=True))
    if penalised:
        lowered = [(_penalise(logit, word, sampling, said, prompt_ids), word) for logit, word in ranked]
        ranked = sorted(lowered, key=lambda each: -each[0])
    return ranked[0][1] if sampling.temperature == 0 else _draw(ranked, sampling, mix(state, seed, 2) / 2**64)


def _penalised(sampling: Sampling) -> bool:
    repetition = sampling.repetition_penalty not in {None, 1.0}
    return repetition or sampling.frequency_penalty != 0 or sampling.presence_penalty != 0


def _penalise(
    logit: float, word: int, sampling: Sampling, said: Mapping[int, int], prompt_ids: frozenset[int]
) -> float:
    count = said.get(word, 0)
    if sampling.repetition_penalty is not None and (count or WORD_IDS[word] in prompt_ids):
        logit = logit / sampling.repetition_penalty
    return logit - sampling.frequency_penalty * count - sampling.presence_penalty * (count > 0)


def _draw(ranked: list[tuple[float, int]], sampling: Sampling, uniform: float) -> int:
    """Sample with temperature, top_k, min_p and top_p; `uniform` picks from what is left."""
    top = ranked[0][0]
    weights = [math.exp((logit - top) / sampling.temperature) for logit, _ in ranked[: sampling.top_k]]
    if sampling.min_p is not None:
        weights = [weight for weight in weights if weight >= sampling.min_p]
    target, kept, total = sampling.top_p * sum(weights), 0, 0.0
    while kept < len(weights) and (kept == 0 or total < target):
        total += weights[kept]
        kept += 1
    mark, passed = uniform * total, 0.0
    for weight, (_, word) in zip(weights[:kept], ranked, strict=False):
        passed += weight
        if mark < passed:
            return word
    return ranked[kept - 1][1]


def word_logprob(state: int, word: int, top: int) -> TokenLogprob:
    """The log-probability of a word before sampling settings, with the `top` likeliest."""
    words = order(state)
    table = [(WORDS[w], _RANK_LOGITS[rank] - _LOG_TOTAL, tuple(WORDS[w].encode())) for rank, w in enumerate(words)]
    text, logprob, raw = table[words.index(word)]
    return TokenLogprob(text, logprob, raw, tuple(table[:top]))


def smallest_instance(schema_text: str) -> str:
    """The JSON text of a small instance of a schema. Raises `Refusal` if it finds none."""
    try:
        schema = msgspec.json.decode(schema_text)
        jsonschema.Draft202012Validator.check_schema(schema)
        instance = _Builder(schema).build(schema)
        fits = jsonschema.Draft202012Validator(schema, registry=referencing.Registry()).is_valid(instance)
    except jsonschema.SchemaError as error:
        raise Refusal(Code.INVALID_REQUEST, f"not a JSON Schema: {error.message}", "response_format") from error
    except UNUSABLE as error:
        raise Refusal(Code.INVALID_REQUEST, f"not a usable JSON Schema: {error}", "response_format") from error
    if not fits:
        text = "the synthetic engine finds no instance of this JSON Schema; use a plainer one"
        raise Refusal(Code.INVALID_REQUEST, text, "response_format")
    return msgspec.json.encode(instance).decode()


@dataclass
class _Builder:
    """Builds an instance from the basic keywords; the caller validates the result against all of them."""

    root: Any
    nodes: int = 0

    def build(self, schema: Any, depth: int = 0) -> Any:
        self.nodes += 1
        if depth > SCHEMA_DEPTH_MAX or self.nodes > SCHEMA_NODES_MAX:
            raise ValueError(f"nested deeper than {SCHEMA_DEPTH_MAX} or larger than {SCHEMA_NODES_MAX} values")
        if not isinstance(schema, dict):
            return {}
        if "const" in schema:
            return schema["const"]
        if schema.get("enum"):
            return schema["enum"][0]
        rest = {k: v for k, v in schema.items() if k not in {"$ref", "anyOf", "oneOf", "allOf"}}
        if "$ref" in schema:
            return self.build({**rest, **self._resolve(schema["$ref"])}, depth + 1)
        for chosen in [(schema.get("anyOf") or [{}])[0], (schema.get("oneOf") or [{}])[0], *schema.get("allOf", [])]:
            if isinstance(chosen, dict):
                rest.update(chosen)
        if rest.keys() & {"$ref", "anyOf", "oneOf", "allOf", "const", "enum"}:
            return self.build(rest, depth + 1)
        return self._plain(rest, depth)

    def _resolve(self, reference: str) -> dict[str, Any]:
        if reference != "#" and not reference.startswith("#/"):
            raise ValueError(f"$ref {reference!r}: only references inside the schema are followed")
        found = self.root
        for part in reference.split("/")[1:]:
            key = part.replace("~1", "/").replace("~0", "~")
            if not isinstance(found, dict) or key not in found:
                raise ValueError(f"$ref {reference!r} points to nothing")
            found = found[key]
        return found if isinstance(found, dict) else {}

    def _plain(self, schema: dict[str, Any], depth: int) -> Any:
        kind = schema.get("type", "array" if "items" in schema else "object")
        match kind[0] if isinstance(kind, list) else kind:
            case "object":
                properties = schema.get("properties", {})
                return {name: self.build(properties.get(name, {}), depth + 1) for name in schema.get("required", [])}
            case "array":
                first = [self.build(each, depth + 1) for each in schema.get("prefixItems", [])]
                more = max(0, int(schema.get("minItems", 0)) - len(first))
                return first + [self.build(schema.get("items", {}), depth + 1) for _ in range(more)]
            case "string":
                return "a" * min(int(schema.get("minLength", 0)), SCHEMA_NODES_MAX)
            case "integer" | "number":
                return _number(schema)
            case "boolean":
                return False
            case _:
                return None


def _number(schema: dict[str, Any]) -> float:
    low: float = schema.get("minimum", -math.inf)
    high: float = schema.get("maximum", math.inf)
    low = max(low, schema.get("exclusiveMinimum", -math.inf) + 1)
    high = min(high, schema.get("exclusiveMaximum", math.inf) - 1)
    nearest = min(max(0, low), high)
    value = math.ceil(nearest) if math.ceil(nearest) <= high else nearest
    step: float | None = schema.get("multipleOf")
    return math.ceil(value / step) * step if step else value
