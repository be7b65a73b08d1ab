"""Parses configurations, `config.pbtxt` or JSON, into a tree of fields; `fill` validates them.

`google.protobuf.text_format` and `json_format` stop at the first error. With the tree, all problems are reported at
once, each with its line, its path (`input[0].dims`) and what is allowed, and in the same words for both formats.
Size, depth and the digits of a number are bounded. The text format is protobuf's, and tests compare with its parser:
https://protobuf.dev/reference/protobuf/textformat-spec/.
"""

import json
import re
from typing import Final, NamedTuple

TEXT_BYTES_MAX: Final = 256 << 10
"""Real files have some kilobytes; the worst case of this size parses in a second."""
DEPTH_MAX: Final = 24
"""Nesting of messages; the deepest field of the schema is at 7."""
NUMBER_CHARS_MAX: Final = 40
SHOWN_CHARS_MAX: Final = 40

_TOKEN = re.compile(
    r"""(?P<space>[ \t\r\f\v]+|\#[^\n]*)
    |(?P<newline>\n)
    |(?P<word>[A-Za-z_][A-Za-z0-9_]*)
    |(?P<number>(?:0[xX][0-9a-fA-F]++|(?:[0-9]++(?:\.[0-9]*+)?|\.[0-9]++)(?:[eE][+-]?[0-9]++)?[fF]?)(?![A-Za-z0-9_.]))
    |(?P<string>"(?:[^"\\\n\0]++|\\.)*+"|'(?:[^'\\\n\0]++|\\.)*+')
    |(?P<mark>[{}<>\[\]:,;\-])""",
    re.VERBOSE,
)
_ESCAPE = re.compile(
    rb"\\(?:(?P<octal>[0-7]{1,3})|x(?P<hex>[0-9a-fA-F]{1,2})"
    rb"|u(?P<short>[0-9a-fA-F]{4})|U(?P<long>[0-9a-fA-F]{8})|(?P<plain>.))",
    re.DOTALL,
)
_PLAIN = {
    b"a": b"\a", b"b": b"\b", b"f": b"\f", b"n": b"\n", b"r": b"\r", b"t": b"\t", b"v": b"\v",
    b"?": b"?", b"\\": b"\\", b"'": b"'", b'"': b'"',
}  # fmt: skip
_CLOSING = {"{": "}", "<": ">"}


class BadText(Exception):  # noqa: N818 - states the condition
    """A syntax error, with its line if known."""


class Word(str):
    """An unquoted value: an enum name or a boolean."""

    __slots__ = ()


class Field(NamedTuple):
    """A field as written. Each element of a list is a field of its own. `line` 0: unknown."""

    name: str
    value: "Value"
    line: int


Value = Word | str | int | float | bool | list[Field]


class _Token(NamedTuple):
    kind: str
    text: str
    line: int


def parse_text(text: bytes) -> list[Field]:
    """Parse a message in text format; fields keep their order. Raises `BadText`."""
    return _Parser(_tokens(_decoded(text))).fields("", 0)


def parse_json(text: str | bytes) -> list[Field]:
    """Parse a JSON object: lists become repeated fields, objects become messages. Raises `BadText`."""
    decoded = _decoded(text if isinstance(text, bytes) else text.encode("utf-8", "replace"))
    try:
        document = json.loads(decoded, object_pairs_hook=_Members)
    except RecursionError:
        raise BadText(f"nested deeper than {DEPTH_MAX} levels") from None
    except ValueError as error:
        raise BadText(f"not JSON: {error}") from None
    if not isinstance(document, _Members):
        raise BadText("not a JSON object")
    return _members(document, 0)


def is_text(text: str) -> bool:
    """Whether it is encodable Unicode without NUL."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return "\0" not in text


class _Members(list[tuple[str, object]]):
    """A JSON object, with duplicate keys kept."""


def _members(members: _Members, depth: int) -> list[Field]:
    if depth > DEPTH_MAX:
        raise BadText(f"nested deeper than {DEPTH_MAX} levels")
    fields = []
    for key, value in members:
        name = key.encode("utf-8", "backslashreplace").decode()  # protobuf's tables fail on unpaired surrogates
        many = isinstance(value, list) and not isinstance(value, _Members)
        for item in value if many else [value]:  # type: ignore[attr-defined]  # a list if many
            if item is None and not many:
                continue
            if isinstance(item, _Members):
                fields.append(Field(name, _members(item, depth + 1), 0))
            elif isinstance(item, str | int | float):
                fields.append(Field(name, item, 0))
            else:
                raise BadText(f"{name!r:.{SHOWN_CHARS_MAX}}: a list within a list, or null in a list")
    return fields


def _decoded(text: bytes) -> str:
    if len(text) > TEXT_BYTES_MAX:
        raise BadText(f"longer than {TEXT_BYTES_MAX} bytes")
    try:
        return text.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = text.count(b"\n", 0, error.start) + 1
        raise BadText(f"line {line}: not UTF-8") from None


def _tokens(text: str) -> list[_Token]:
    tokens = []
    at, line, end = 0, 1, len(text)
    match = _TOKEN.match
    while at < end:
        found = match(text, at)
        if found is None:
            what = "an unterminated string" if text[at] in "\"'" else f"unexpected {text[at : at + 10]!r}"
            raise BadText(f"line {line}: {what}")
        kind = found.lastgroup or ""
        if kind == "newline":
            line += 1
        elif kind != "space":
            tokens.append(_Token(kind, found.group(), line))
        at = found.end()
    tokens.append(_Token("end", "the end of the file", line))
    return tokens


class _Parser:
    """Recursive-descent parser over the tokens."""

    def __init__(self, tokens: list[_Token]) -> None:
        self._tokens = tokens
        self._at = 0

    def fields(self, closing: str, depth: int) -> list[Field]:
        """Parse up to and including `closing`; empty: up to the end."""
        if depth > DEPTH_MAX:
            raise BadText(f"line {self._now.line}: nested deeper than {DEPTH_MAX} levels")
        fields: list[Field] = []
        while True:
            token = self._take()
            if token.text == closing or (token.kind == "end" and not closing):
                return fields
            if token.kind != "word":
                expected = f"a field or '{closing}'" if closing else "a field"
                raise BadText(f"line {token.line}: found {_shown(token)} where {expected} should be")
            self._field(token, fields, depth)
            if self._now.text in {",", ";"}:
                self._at += 1

    def _field(self, name: _Token, fields: list[Field], depth: int) -> None:
        colon = self._skip(":")
        if self._skip("["):
            while not self._skip("]"):
                fields.append(Field(name.text, self._value(name, depth, colon=colon), name.line))
                if not self._skip(",") and self._now.text != "]":
                    raise BadText(f"line {self._now.line}: found {_shown(self._now)} where ',' or ']' should be")
        else:
            fields.append(Field(name.text, self._value(name, depth, colon=colon), name.line))

    def _value(self, name: _Token, depth: int, *, colon: bool) -> Value:
        token = self._take()
        if token.text in _CLOSING:
            return self.fields(_CLOSING[token.text], depth + 1)
        if not colon:
            raise BadText(f"line {token.line}: found {_shown(token)} after '{name.text}' where ':' or '{{' should be")
        if token.kind == "string":
            raw = _unescaped(token)
            while self._now.kind == "string":
                raw += _unescaped(self._take())
            try:
                return raw.decode()
            except UnicodeDecodeError:
                raise BadText(f"line {token.line}: {name.text} is not UTF-8") from None
        negative = token.text == "-"
        if negative:
            token = self._take()
        if token.kind == "number":
            number = _number(token)
            return -number if negative else number
        if token.kind == "word" and (not negative or token.text.lower() in {"inf", "infinity", "nan"}):
            return Word(f"-{token.text}" if negative else token.text)
        raise BadText(f"line {token.line}: found {_shown(token)} where the value of '{name.text}' should be")

    @property
    def _now(self) -> _Token:
        return self._tokens[self._at]

    def _take(self) -> _Token:
        token = self._tokens[self._at]
        if token.kind != "end":
            self._at += 1
        return token

    def _skip(self, mark: str) -> bool:
        there = self._now.text == mark
        self._at += there
        return there


def _shown(token: _Token) -> str:
    if token.kind == "end":
        return token.text
    text = token.text
    return f"'{text if len(text) <= SHOWN_CHARS_MAX else text[:SHOWN_CHARS_MAX] + '…'}'"


def _number(token: _Token) -> int | float:
    text = token.text
    if len(text) > NUMBER_CHARS_MAX:
        raise BadText(f"line {token.line}: a number of {len(text)} characters; at most {NUMBER_CHARS_MAX}")
    if text[:2] in {"0x", "0X"}:
        return int(text, 16)
    if text.isdigit():
        octal = len(text) > 1 and text[0] == "0"
        if octal and set(text) & {"8", "9"}:
            raise BadText(f"line {token.line}: {text} begins with 0, but is not octal")
        return int(text, 8 if octal else 10)
    return float(text.rstrip("fF"))


def _unescaped(token: _Token) -> bytes:
    def plain(found: re.Match[bytes]) -> bytes:
        kind, digits = found.lastgroup, found.group(found.lastgroup or 0)
        if kind == "plain":
            if digits not in _PLAIN:
                raise BadText(f"line {token.line}: unknown escape \\{digits.decode('utf-8', 'replace')} in a string")
            return _PLAIN[digits]
        code = int(digits, 8 if kind == "octal" else 16)
        if kind in {"octal", "hex"}:
            return bytes((code & 0xFF,))
        try:
            return chr(code).encode()
        except (ValueError, OverflowError):
            raise BadText(f"line {token.line}: \\{digits.decode()} is not a character") from None

    return _ESCAPE.sub(plain, token.text[1:-1].encode())
