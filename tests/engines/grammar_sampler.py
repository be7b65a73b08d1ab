"""Draws texts from a grammar in the notation of `forebay.engines.schema`: what an engine could be made to say."""

import math
import re
from dataclasses import dataclass, field
from random import Random
from typing import Any

_TOKEN = re.compile(r'"(?:[^"\\]|\\.)*"|\[(?:[^\]\\]|\\.)*\]|[a-z][a-z0-9]*|\{\d+(?:,\d*)?\}|[()|*?+]')
_REPEATS = {"*": (0, None), "?": (0, 1), "+": (1, None)}
_DEEP = 30
_MORE_MAX = 3
_DRAWS_MAX = 5_000
"""With so many rules drawn, the rest of a text is as short as it may be: what repeats itself can grow without end."""
_SAMPLE_CHARS = [chr(code) for code in (*range(32, 127), 0xE9, 0x1F30A)]


@dataclass
class Grammar:
    """A parsed grammar. An expression is ("text", s), ("class", chars), ("rule", name), ("all", list), ("one", list)
    or ("repeat", expression, low, high)."""

    rules: dict[str, Any] = field(default_factory=dict)
    heights: dict[str, float] = field(default_factory=dict)
    _draws: int = 0

    @classmethod
    def parse(cls, text: str) -> "Grammar":
        grammar = cls()
        for line in text.strip("\n").split("\n"):  # `splitlines` would cut at U+0085 too, inside a literal
            name, _, body = line.partition(" ::= ")
            tokens = _TOKEN.findall(body)
            assert re.sub(r"\s", "", _TOKEN.sub("", body)) == "", f"not in the notation: {body}"
            grammar.rules[name] = _choice(tokens)
            assert not tokens, f"left over in {name}: {tokens}"
        grammar.heights = dict.fromkeys(grammar.rules, math.inf)
        for _ in grammar.rules:
            before = dict(grammar.heights)
            for name, body in grammar.rules.items():
                grammar.heights[name] = 1 + grammar._height(body)
            if before == grammar.heights:
                break
        return grammar

    def sample(self, rng: Random) -> str:
        self._draws = 0
        return self._draw(self.rules["root"], rng, 0)

    def _height(self, node: Any) -> float:
        match node:
            case ("rule", name):
                return self.heights[name]
            case ("all", parts):
                return max((self._height(each) for each in parts), default=0)
            case ("one", parts):
                return min(self._height(each) for each in parts)
            case ("repeat", part, low, _):
                return self._height(part) if low else 0
        return 0

    def _draw(self, node: Any, rng: Random, depth: int) -> str:
        match node:
            case ("text", text):
                return str(text)
            case ("class", chars):
                return str(rng.choice(chars))
            case ("rule", name):
                self._draws += 1
                return self._draw(self.rules[name], rng, depth + 1 if self._draws < _DRAWS_MAX else _DEEP + 1)
            case ("all", parts):
                return "".join(self._draw(each, rng, depth) for each in parts)
            case ("one", parts):
                picked = min(parts, key=self._height) if depth > _DEEP else rng.choice(parts)
                return self._draw(picked, rng, depth)
            case ("repeat", part, low, high):
                most = low + _MORE_MAX if high is None else high
                count = low if depth > _DEEP else rng.randint(low, min(most, low + _MORE_MAX))
                return "".join(self._draw(part, rng, depth) for _ in range(count))
        raise AssertionError(node)


def _choice(tokens: list[str]) -> Any:
    parts = [_sequence(tokens)]
    while tokens and tokens[0] == "|":
        tokens.pop(0)
        parts.append(_sequence(tokens))
    return parts[0] if len(parts) == 1 else ("one", parts)


def _sequence(tokens: list[str]) -> Any:
    parts: list[Any] = []
    while tokens and tokens[0] not in "|)":
        token = tokens.pop(0)
        if token == "(":
            parts.append(_choice(tokens))
            assert tokens.pop(0) == ")"
        elif token[0] == '"':
            parts.append(("text", _unescape(token[1:-1])))
        elif token[0] == "[":
            members = re.compile(token)
            parts.append(("class", [each for each in _SAMPLE_CHARS if members.fullmatch(each)]))
        elif token in _REPEATS or token[0] == "{":
            low, high = _REPEATS.get(token) or _count(token)
            parts[-1] = ("repeat", parts[-1], low, high)
        else:
            parts.append(("rule", token))
    return ("all", parts)


def _count(token: str) -> tuple[int, int | None]:
    low, comma, high = token[1:-1].partition(",")
    return int(low), int(low) if not comma else int(high) if high else None


def _unescape(text: str) -> str:
    known = {"n": "\n", "r": "\r", "t": "\t"}
    return re.sub(
        r"\\(x([0-9a-f]{2})|.)",
        lambda m: chr(int(m[2], 16)) if m[2] else known.get(m[1], m[1]),
        text,
        flags=re.DOTALL,
    )
