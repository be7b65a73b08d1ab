"""Compiles JSON Schemas to grammars that constrain an engine's output, or rejects them with the reason.

Engines get a grammar of our own, never the schema: a schema that its library rejects breaks an OpenVINO pipeline for
good, and the library's own translation allows unlimited white space, in which small models get lost.

The grammar describes a subset of the valid instances: properties in the order of the schema, none that it does not
name (if it names any), at most one space after `,` and `:`, numbers of limited length. Keywords that restrict values
and are not in `KEYWORDS` are rejected by name. The notation is common to llama.cpp (GBNF) and xgrammar.
"""

import graphlib
import json
import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import combinations
from typing import Any, NoReturn
from urllib.parse import unquote

import jsonschema
import referencing

from forebay.core.errors import Code, Refusal
from forebay.engines.numerals import bound, decimals, integers

SCHEMA_BYTES_MAX = 65_536
DEPTH_MAX = 32
NODES_MAX = 2_000
ENUM_VALUES_MAX = 1_000
STRING_CHARS_MAX = 500
"""Limit for the sum of distinct `maxLength` of a schema: xgrammar takes about 10 ms per counted character."""
ITEMS_MAX = 1_000  # for `minItems` and `maxItems`
BOUND_MAX = 10**15 - 1
"""Maximum magnitude of a `minimum` or `maximum`."""
PARAM = "response_format"

ANNOTATIONS = frozenset(
    (
        "title", "description", "default", "examples", "deprecated", "readOnly", "writeOnly", "$comment", "$schema",
        "$id", "$defs", "definitions", "contentMediaType", "contentEncoding", "discriminator",
    )
)  # fmt: skip
KEYWORDS = frozenset(
    (
        "type", "properties", "required", "additionalProperties", "items", "prefixItems", "minItems", "maxItems",
        "minLength", "maxLength", "format", "minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "enum",
        "const", "anyOf", "oneOf", "allOf", "$ref",
    )
)  # fmt: skip
_ALONE = ("$ref", "anyOf", "oneOf", "allOf")
"""Keywords that must not be combined with others, except annotations."""
_INNER = ("properties", "additionalProperties", "items", "prefixItems")

_DIGITS = "[0-9]"
FORMATS = {
    "date": f'{_DIGITS}{{4}} "-" ("0" [1-9] | "1" [0-2]) "-" ("0" [1-9] | "1" [0-9] | "2" [0-8])',
    "time": '([01] [0-9] | "2" [0-3]) ":" [0-5] [0-9] ":" [0-5] [0-9] "Z"',
    "uuid": "[0-9a-f]{8} " + '"-" [0-9a-f]{4} ' * 3 + '"-" [0-9a-f]{12}',
}
FORMATS["date-time"] = f'{FORMATS["date"]} "T" {FORMATS["time"]}'

COMMA = '"," ws'
PLAIN_CHAR = r'[^"\\\x00-\x1f\x7f]'
"""A character of a JSON string that needs no escape."""

_BASE = {
    "ws": '" "?',
    "char": PLAIN_CHAR + r' | "\\" (["\\/bfnrt] | "u00" [01] [0-9a-f])',
    "string": r'"\"" char* "\""',
    "integer": '"-"? ("0" | [1-9] [0-9]{0,14})',
    "number": 'integer ("." [0-9]{1,15})? ([eE] [-+]? [0-9]{1,2})?',
    "boolean": '"true" | "false"',
    "null": '"null"',
    "member": 'string ":" ws value',
    "object": '"{" (member ("," ws member)*)? "}"',
    "array": '"[" (value ("," ws value)*)? "]"',
    "value": "object | array | string | number | boolean | null",
}
_HINTS = (
    ("object", ("properties", "required", "additionalProperties")),
    ("array", ("items", "prefixItems", "minItems", "maxItems")),
    ("string", ("minLength", "maxLength", "format")),
    ("number", ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum")),
)


def json_grammar(schema_text: str) -> str:
    """A grammar with start rule `root` that only derives valid instances. Raises `Refusal` if that is impossible."""
    if len(schema_text.encode("utf-8", "replace")) > SCHEMA_BYTES_MAX:
        _refuse("", f"the schema is larger than {SCHEMA_BYTES_MAX} bytes")
    try:
        schema = json.loads(schema_text)
        _Depth().check(schema)
        jsonschema.Draft202012Validator.check_schema(schema)
        builder = _Builder(schema)
        root = builder.expression(schema, "")
        builder.check_references()
    except jsonschema.SchemaError as error:
        _refuse("/".join(map(str, error.absolute_path)), error.message)
    except (ValueError, RecursionError, referencing.exceptions.Unresolvable) as error:
        _refuse("", f"not a JSON Schema: {error}")
    rules = {**_BASE, **builder.rules, "root": root}
    return "".join(f"{name} ::= {body}\n" for name, body in rules.items())


def literal(text: str) -> str:
    """A text as a terminal of the grammar."""
    quoted = "".join(_ESCAPES.get(character, character) for character in text)
    return f'"{quoted}"'


_ESCAPES = {'"': '\\"', "\\": "\\\\", **{chr(code): f"\\x{code:02x}" for code in (*range(32), 127)}}


def _refuse(path: str, what: str, code: Code = Code.INVALID_REQUEST) -> NoReturn:
    raise Refusal(code, f"the JSON Schema cannot be used: at #{path and '/' + path.strip('/')}: {what}", PARAM)


def _unsupported(path: str, what: str) -> NoReturn:
    _refuse(path, what, Code.UNSUPPORTED_PARAMETER)


@dataclass
class _Depth:
    """Bounds a document before anything recursive visits it."""

    nodes: int = 0

    def check(self, value: Any, depth: int = 0) -> None:
        self.nodes += 1
        if depth > DEPTH_MAX:
            _refuse("", f"nested deeper than {DEPTH_MAX} levels")
        if self.nodes > NODES_MAX * 4:
            _refuse("", f"it holds more than {NODES_MAX * 4} values")
        if isinstance(value, dict):
            for each in value.values():
                self.check(each, depth + 1)
        elif isinstance(value, list):
            for each in value:
                self.check(each, depth + 1)


@dataclass
class _Builder:
    """Compiles the nodes of one schema into rules."""

    root: Any
    rules: dict[str, str] = field(default_factory=dict)
    refs: dict[str, str] = field(default_factory=dict)
    """`$ref` → its rule."""
    sound: set[int] = field(default_factory=set)
    """Ids of the targets that were checked."""
    begins: dict[str, set[str]] = field(default_factory=dict)
    """`$ref` → references that can occur at its very beginning."""
    owner: str | None = None
    """The `$ref` being expanded, until it has derived a character."""
    counted: dict[tuple[int, int | None], str] = field(default_factory=dict)
    """Length range of strings → their rule; equal ranges share it."""
    nodes: int = 0

    def expression(self, schema: Any, path: str) -> str:
        """An expression that derives the values of a node; can be part of a sequence."""
        self.nodes += 1
        if self.nodes > NODES_MAX:
            _refuse(path, f"more than {NODES_MAX} subschemas")
        if schema is True or schema == {}:
            return "value"
        if schema is False:
            _refuse(path, "`false` accepts nothing")
        _check_keywords(schema, path)
        if "enum" in schema or "const" in schema:
            for name in [each for each in _INNER if each in schema]:  # validation may never end with others' keywords
                self.expression({name: schema[name]}, path)
            return _constants(schema, self.root, path)
        if "$ref" in schema:
            return self._reference(schema["$ref"], path)
        if "allOf" in schema:
            if len(schema["allOf"]) > 1:
                _unsupported(path, "`allOf` of more than one schema; merge them")
            return self.expression(schema["allOf"][0], f"{path}/allOf/0")
        for keyword in ("anyOf", "oneOf"):
            if keyword in schema:
                return self._alternatives(schema[keyword], keyword, path)
        kinds = _kinds(schema)
        if kinds is None:
            return "value"
        return _one_of([self._typed(kind, schema, path) for kind in kinds])

    def check_references(self) -> None:
        """Reject references that lead back to themselves without a character, or that have no finite instance."""
        try:
            graphlib.TopologicalSorter(self.begins).prepare()
        except graphlib.CycleError as error:
            _refuse("", f"`$ref` {error.args[1][0]!r} leads back to itself without anything in between")
        if not _Finite(self).check(self.root, frozenset()):
            _refuse("", "it describes only infinite values: a required `$ref` leads back to itself")

    def resolve(self, reference: str, path: str) -> Any:
        """The target of a `$ref`."""
        if reference != "#" and not reference.startswith("#/"):
            _unsupported(path, f"`$ref` {reference!r}: only references inside the schema (`#/$defs/…`) are followed")
        found = self.root
        for part in reference.split("/")[1:]:
            key = unquote(part).replace("~1", "/").replace("~0", "~")
            if isinstance(found, list) and key.isdecimal() and int(key) < len(found):
                found = found[int(key)]
            elif isinstance(found, dict) and key in found:
                found = found[key]
            else:
                _refuse(path, f"`$ref` {reference!r} points to nothing")
        if not isinstance(found, dict | bool):
            _refuse(path, f"`$ref` {reference!r} does not point to a schema")
        if id(found) not in self.sound:  # it may lie in a `default`, for example, which holds anything
            jsonschema.Draft202012Validator.check_schema(found)
            self.sound.add(id(found))
        return found

    def _rule(self, body: str) -> str:
        name = f"r{len(self.rules)}"
        self.rules[name] = body
        return name

    @contextmanager
    def _inside(self, owner: str | None) -> Iterator[None]:
        before, self.owner = self.owner, owner
        yield
        self.owner = before

    def _reference(self, reference: str, path: str) -> str:
        if self.owner is not None:
            self.begins.setdefault(self.owner, set()).add(reference)
        if reference not in self.refs:
            target = self.resolve(reference, path)
            self.refs[reference] = name = self._rule("")
            with self._inside(reference):
                self.rules[name] = self.expression(target, reference.lstrip("#/"))
        return self.refs[reference]

    def _alternatives(self, branches: Sequence[Any], keyword: str, path: str) -> str:
        if keyword == "oneOf" and not all(self._exclusive(a, b, path) for a, b in combinations(branches, 2)):
            text = "`oneOf` whose branches may hold at the same time; give them different types or constants"
            _unsupported(path, f"{text}, or use `anyOf`")
        possible = [(n, branch) for n, branch in enumerate(branches) if branch is not False]
        if not possible:
            _refuse(path, f"no branch of `{keyword}` accepts anything")
        return _one_of([self.expression(branch, f"{path}/{keyword}/{n}") for n, branch in possible])

    def _exclusive(self, a: Any, b: Any, path: str) -> bool:
        """Whether no value satisfies both: different types, or objects with a required constant that differs."""
        a, b = self._plain(a, path), self._plain(b, path)
        if not isinstance(a, dict) or not isinstance(b, dict):
            return False
        kinds = [set(_constant_kinds(each) or _kinds(each) or ()) for each in (a, b)]
        kinds = [each | {"integer"} if "number" in each else each for each in kinds]
        if all(kinds) and not kinds[0] & kinds[1] and all("type" in each or _values(each) for each in (a, b)):
            return True  # without a type, a keyword about strings, say, accepts all other types
        if kinds != [{"object"}, {"object"}] and not (_values(a) and _values(b)):
            return False
        if _values(a) and _values(b):
            return not any(value in _values(b) for value in _values(a))
        return any(
            _values(one) and _values(other) and not any(value in _values(other) for value in _values(one))
            for name in set(a.get("required", ())) & set(b.get("required", ()))
            for one, other in [(_property(a, name), _property(b, name))]
        )

    def _plain(self, schema: Any, path: str) -> Any:
        for _ in range(DEPTH_MAX):
            if not isinstance(schema, dict) or "$ref" not in schema:
                break
            schema = self.resolve(schema["$ref"], path)
        return schema

    def _typed(self, kind: str, schema: Mapping[str, Any], path: str) -> str:
        if kind == "string":
            return self._string(schema, path)
        if kind in {"number", "integer"}:
            return _number(schema, kind, path)
        if kind in {"object", "array"}:
            with self._inside(None):
                return self._object(schema, path) if kind == "object" else self._array(schema, path)
        return kind

    def _string(self, schema: Mapping[str, Any], path: str) -> str:
        low, high = _bounds(schema, "minLength", "maxLength", STRING_CHARS_MAX, path)
        form = schema.get("format")
        if form is not None:
            if form not in FORMATS or low or high is not None:
                known = ", ".join(sorted(FORMATS))
                _unsupported(path, f"`format` {form!r}; supported are {known}, without length limits")
            return f'("\\"" {FORMATS[form]} "\\"")'
        if low == 0 and high is None:
            return "string"
        if (low, high) not in self.counted:
            self.counted[low, high] = self._rule(f'"\\"" {PLAIN_CHAR}{_times(low, high)} "\\""')
            chars = sum(low if high is None else high for low, high in self.counted)
            if chars > STRING_CHARS_MAX:
                text = f"the different lengths of strings add up to {chars}; at most {STRING_CHARS_MAX} are allowed"
                _unsupported(path, f"{text}: leave out `maxLength` here, or use fewer different ones")
        return self.counted[low, high]

    def _object(self, schema: Mapping[str, Any], path: str) -> str:
        properties = dict(schema.get("properties", {}))
        required = schema.get("required", [])
        more = schema.get("additionalProperties", True)
        for name in required:
            if name not in properties:
                if more is False:
                    _refuse(path, f"property {name!r} is required, but `additionalProperties` forbids it")
                properties[name] = more
        if not properties:
            return self._free_object(more, path)
        optional = [name for name in properties if name not in required and properties[name] is False]
        for name in optional:
            del properties[name]
        made = []
        for name, each in properties.items():
            value = self.expression(each, f"{path}/properties/{name}")
            made.append((f'{literal(json.dumps(name, ensure_ascii=False))} ":" ws {value}', name in required))
        return f'("{{" {self._members(made)} "}}")'

    def _members(self, made: Sequence[tuple[str, bool]]) -> str:
        """Members in order, as two chains of rules: following another member (comma first), and as the first one."""
        first_required = next((place for place, (_, required) in enumerate(made) if required), len(made))
        after = first = '""'
        for place, (member, required) in reversed(tuple(enumerate(made))):
            name = self._rule(member)
            more = after
            if place:
                after = self._rule(f"{COMMA} {name} {more}" if required else f"({COMMA} {name} {more}) | {more}")
            if place <= first_required:
                first = self._rule(f"{name} {more}" if required else f"({name} {more}) | {first}")
        return first

    def _free_object(self, more: Any, path: str) -> str:
        if more is True or more == {}:
            return "object"
        if more is False:
            return '"{}"'
        value = self.expression(more, f"{path}/additionalProperties")
        member = self._rule(f'string ":" ws {value}')
        return f'("{{" ({member} ("," ws {member})*)? "}}")'

    def _array(self, schema: Mapping[str, Any], path: str) -> str:
        low, high = _bounds(schema, "minItems", "maxItems", ITEMS_MAX, path)
        fixed = schema.get("prefixItems", [])
        rest = schema.get("items", True)
        if rest is False:
            if low > len(fixed):
                _refuse(path, f"`minItems` is {low}, but only {len(fixed)} items are allowed")
            high = len(fixed) if high is None else min(high, len(fixed))
        first = [self.expression(each, f"{path}/prefixItems/{n}") for n, each in enumerate(fixed[:high])]
        chain = '""'
        if rest is not False and high != len(first):
            item = self.expression(rest, f"{path}/items")
            most = None if high is None else high - max(1, len(first))
            chain = f"{self._rule(f'{COMMA} {item}')}{_times(max(0, low - max(1, len(first))), most)}"
            if not first:
                chain = f"{item} {chain}" if low else f"({item} {chain})?"
        for place, each in reversed(tuple(enumerate(first))):
            chain = f"{COMMA} {each} {chain}" if place else f"{each} {chain}"
            chain = self._rule(chain if place < low else f"({chain})?")
        return f'("[" {chain} "]")'


@dataclass
class _Finite:
    """Whether a schema has a finite instance: no required part contains itself."""

    builder: _Builder
    known: set[str] = field(default_factory=set)
    looks: int = 0

    def check(self, schema: Any, above: frozenset[str]) -> bool:
        self.looks += 1
        if self.looks > NODES_MAX * 10:
            _refuse("", "its references are too complex")
        if not isinstance(schema, dict) or "enum" in schema or "const" in schema:
            return True
        if "$ref" in schema:
            return self._reference(schema["$ref"], above)
        branches = schema.get("anyOf") or schema.get("oneOf") or schema.get("allOf")
        if branches:
            return any(branch is not False and self.check(branch, above) for branch in branches)
        return any(self._typed(kind, schema, above) for kind in _kinds(schema) or ("null",))

    def _reference(self, reference: str, above: frozenset[str]) -> bool:
        if reference in self.known:
            return True
        if reference in above or not self.check(self.builder.resolve(reference, ""), above | {reference}):
            return False
        self.known.add(reference)
        return True

    def _typed(self, kind: str, schema: Mapping[str, Any], above: frozenset[str]) -> bool:
        needed: list[Any] = []
        if kind == "object":
            needed = [_property(schema, name) for name in schema.get("required", ())]
        elif kind == "array" and (low := schema.get("minItems", 0)):
            fixed = schema.get("prefixItems", [])
            needed = [*fixed[: int(low)], *([schema.get("items", True)] if low > len(fixed) else [])]
        return all(self.check(each, above) for each in needed)


def _check_keywords(schema: Mapping[str, Any], path: str) -> None:
    for name, value in schema.items():
        harmless = name in ANNOTATIONS or (name == "uniqueItems" and value is False)
        if name not in KEYWORDS and not harmless:
            _unsupported(path, f"`{name}` is not supported; what is: {', '.join(sorted(KEYWORDS))}")
    alone = [name for name in _ALONE if name in schema]
    beside = [name for name in schema if name in KEYWORDS and name not in alone]
    if alone and (len(alone) > 1 or beside):
        others = ", ".join(f"`{name}`" for name in (*alone[1:], *beside))
        _unsupported(path, f"`{alone[0]}` together with {others}; put them into separate schemas")


def _kinds(schema: Mapping[str, Any]) -> list[str] | None:
    """The types of a schema; without `type` the one that its keywords apply to; None: any."""
    kinds = schema.get("type", next((kind for kind, hints in _HINTS if schema.keys() & hints), None))
    return [kinds] if isinstance(kinds, str) else kinds


def _values(schema: Any) -> list[Any]:
    """The values of `enum` or `const`, if present."""
    if not isinstance(schema, dict):
        return []
    return [schema["const"]] if "const" in schema else list(schema.get("enum", []))


def _constant_kinds(schema: Mapping[str, Any]) -> set[str]:
    kinds = {dict: "object", list: "array", str: "string", bool: "boolean", int: "number", float: "number"}
    return {kinds.get(type(value), "null") for value in _values(schema)}


def _property(schema: Mapping[str, Any], name: str) -> Any:
    return schema.get("properties", {}).get(name, schema.get("additionalProperties", True))


def _one_of(alternatives: Sequence[str]) -> str:
    return alternatives[0] if len(alternatives) == 1 else f"({' | '.join(alternatives)})"


def _times(low: int, high: int | None) -> str:
    """The repetition suffix for these counts."""
    if high is None:
        return "*" if low == 0 else f"{{{low},}}"
    return f"{{{low},{high}}}"


def _constants(schema: Mapping[str, Any], root: Any, path: str) -> str:
    values = _values(schema)
    if len(values) > ENUM_VALUES_MAX:
        _refuse(path, f"`enum` has {len(values)} values; at most {ENUM_VALUES_MAX} are allowed")
    plain = {name: each for name, each in schema.items() if name not in ANNOTATIONS}
    validator = jsonschema.Draft202012Validator(root, registry=referencing.Registry()).evolve(schema=plain)
    fit = [each for each in values if validator.is_valid(each)]
    if not fit:
        _refuse(path, "no value of `enum` or `const` satisfies the keywords beside it")
    texts = dict.fromkeys(json.dumps(each, ensure_ascii=False) for each in fit)
    return _one_of([literal(text) for text in texts])


def _bounds(
    schema: Mapping[str, Any], low_name: str, high_name: str, limit: int, path: str
) -> tuple[int, int | None]:
    """A pair of counts, checked against each other and the limit."""
    low, high = int(schema.get(low_name, 0)), schema.get(high_name)
    for name, value in ((low_name, low), (high_name, high or 0)):
        if value > limit:
            _unsupported(path, f"`{name}` is {value}; at most {limit} is allowed")
    if high is not None and low > high:
        _refuse(path, f"`{low_name}` {low} is greater than `{high_name}` {high}")
    return low, None if high is None else int(high)


def _number(schema: Mapping[str, Any], kind: str, path: str) -> str:
    low, open_low = bound(schema, "minimum", "exclusiveMinimum", -1)
    high, open_high = bound(schema, "maximum", "exclusiveMaximum", 1)
    if low is None and high is None:
        return kind
    for value in (low, high):
        if value is not None and abs(value) > BOUND_MAX:
            _unsupported(path, f"a bound of {value}; bounds of up to {BOUND_MAX} are supported")
        if value is not None and kind == "number" and value != int(value):
            _unsupported(path, f"a bound of {value} on a `number`; only whole bounds are supported")
    if kind == "integer":
        first = -BOUND_MAX if low is None else math.floor(low) + 1 if open_low else math.ceil(low)
        last = BOUND_MAX if high is None else math.ceil(high) - 1 if open_high else math.floor(high)
        parts = integers(first, last)
    else:
        parts = decimals(
            -BOUND_MAX if low is None else int(low), BOUND_MAX if high is None else int(high), open_low, open_high
        )
    if not parts:
        _refuse(path, "no number satisfies its bounds")
    return f"({' | '.join(parts)})"
