"""JSON Schema to grammar: whatever the grammar derives satisfies the schema, and what is refused says why."""

import json
import re
from random import Random
from typing import Any

import jsonschema
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.engines.grammar_sampler import Grammar
from tests.engines.schema_strategy import schemas
from tests.examples import examples

from forebay.core.errors import Code, Refusal
from forebay.engines.numerals import decimals, integers
from forebay.engines.schema import json_grammar

NODE = {"$defs": {"n": {"type": "object", "properties": {"next": {"$ref": "#/$defs/n"}}}}, "$ref": "#/$defs/n"}
PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 40},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
        "mail": {"anyOf": [{"type": "string"}, {"type": "null"}], "default": None},
        'odd "key"\n\\ 🌊': {"enum": ['a"b', "\n\t", "é🌊", 1.5, None, [True]]},
    },
    "required": ["age"],
    "additionalProperties": False,
}
ACCEPTED: dict[str, Any] = {
    "anything": {},
    "json_object": {"type": "object"},
    "person": PERSON,
    "all optional": {"type": "object", "properties": {"a": {"type": "null"}, "b": {"type": "boolean"}, "c": {}}},
    "map": {"type": "object", "additionalProperties": {"type": "integer"}},
    "empty object": {"type": "object", "additionalProperties": False},
    "required only": {"type": "object", "required": ["x"]},
    "forbidden property": {"type": "object", "properties": {"a": False, "b": {"const": 1}}},
    "recursive": NODE,
    "tree": {
        "type": "object",
        "properties": {"kids": {"type": "array", "items": {"$ref": "#"}}},
        "required": ["kids"],
    },
    "definitions": {"definitions": {"a/b": {"type": "string"}}, "$ref": "#/definitions/a~1b"},
    "pydantic": {"$defs": {"P": PERSON}, "properties": {"p": {"allOf": [{"$ref": "#/$defs/P"}]}}, "title": "T"},
    "tuple": {"type": "array", "prefixItems": [{"type": "integer"}, {"type": "string"}], "items": False},
    "tuple and more": {
        "type": "array",
        "prefixItems": [{"type": "null"}],
        "items": {"type": "boolean"},
        "minItems": 3,
    },
    "short tuple": {"type": "array", "prefixItems": [{"type": "null"}, {"type": "null"}], "maxItems": 1},
    "items": {"type": "array", "items": {"type": "number"}, "minItems": 2, "maxItems": 4},
    "no items": {"type": "array", "maxItems": 0},
    "lengths": {"type": "string", "minLength": 2, "maxLength": 5},
    "long": {"type": "string", "minLength": 3},
    "types": {"type": ["string", "null", "integer"], "maxLength": 3, "maximum": 7},
    "numbers": {"type": "number", "minimum": -3, "exclusiveMaximum": 12},
    "whole from fractions": {"type": "integer", "minimum": 0.5, "exclusiveMaximum": 3.0},
    "enum with type": {"type": "integer", "enum": ["no", 3, True, 5]},
    "constant with parts": {
        "$defs": {"n": {"type": "integer"}},
        "enum": [{"a": 1}, {"a": "x"}],
        "properties": {"a": {"$ref": "#/$defs/n"}},
    },
    "one of": {"oneOf": [{"type": "string"}, {"type": "integer"}, {"type": "null"}]},
    "discriminated": {
        "oneOf": [
            {"properties": {"kind": {"const": kind}, "v": {"type": what}}, "required": ["kind", "v"]}
            for kind, what in (("a", "integer"), ("b", "string"))
        ]
    },
    **{form: {"type": "string", "format": form} for form in ("date", "time", "date-time", "uuid")},
}


@pytest.mark.parametrize("name", ACCEPTED)
def test_whatever_the_grammar_derives_satisfies_the_schema(name: str) -> None:
    schema = ACCEPTED[name]
    grammar, rng = Grammar.parse(json_grammar(json.dumps(schema))), Random(name)
    validator = jsonschema.Draft202012Validator(schema, format_checker=jsonschema.Draft202012Validator.FORMAT_CHECKER)
    for _ in range(60):
        text = grammar.sample(rng)
        validator.validate(json.loads(text, parse_constant=pytest.fail))


@settings(max_examples=examples(300), deadline=None)
@given(schemas(), st.integers(0, 2**32))
def test_a_generated_schema_is_refused_or_its_grammar_keeps_it(schema: Any, seed: int) -> None:
    try:
        text = json_grammar(json.dumps(schema))
    except Refusal:
        return
    grammar, rng = Grammar.parse(text), Random(seed)
    for _ in range(5):
        jsonschema.Draft202012Validator(schema).validate(json.loads(grammar.sample(rng)))


@pytest.mark.parametrize(
    ("schema", "code", "says"),
    [
        ("{", Code.INVALID_REQUEST, "not a JSON Schema"),
        ("[]", Code.INVALID_REQUEST, "not of type"),
        ({"type": "no such type"}, Code.INVALID_REQUEST, "#/type"),
        ({"properties": {"a": {"type": 7}}}, Code.INVALID_REQUEST, "#/properties/a/type"),
        (False, Code.INVALID_REQUEST, "accepts nothing"),
        ({"properties": {"a": False}, "required": ["a"]}, Code.INVALID_REQUEST, "#/properties/a"),
        ({"type": "string", "pattern": "a+"}, Code.UNSUPPORTED_PARAMETER, "`pattern`"),
        ({"items": {"not": {}}}, Code.UNSUPPORTED_PARAMETER, "#/items: `not`"),
        ({"type": "array", "uniqueItems": True}, Code.UNSUPPORTED_PARAMETER, "`uniqueItems`"),
        ({"if": {}, "then": {}}, Code.UNSUPPORTED_PARAMETER, "`if`"),
        ({"type": "string", "format": "email"}, Code.UNSUPPORTED_PARAMETER, "date-time"),
        ({"type": "number", "minimum": 0.5}, Code.UNSUPPORTED_PARAMETER, "whole bounds"),
        ({"type": "integer", "maximum": 10**18}, Code.UNSUPPORTED_PARAMETER, "bounds of up to"),
        ({"type": "integer", "minimum": 5, "maximum": 4}, Code.INVALID_REQUEST, "no number"),
        ({"type": "integer", "exclusiveMinimum": 3, "exclusiveMaximum": 4}, Code.INVALID_REQUEST, "no number"),
        ({"minLength": 5, "maxLength": 4}, Code.INVALID_REQUEST, "greater than `maxLength`"),
        ({"maxLength": 10_000}, Code.UNSUPPORTED_PARAMETER, "at most 500"),
        (
            {"properties": {str(n): {"maxLength": 200 + n} for n in range(3)}},
            Code.UNSUPPORTED_PARAMETER,
            "add up to 603",
        ),
        ({"minItems": 5, "maxItems": 4}, Code.INVALID_REQUEST, "greater than `maxItems`"),
        ({"prefixItems": [{}], "items": False, "minItems": 2}, Code.INVALID_REQUEST, "only 1 items"),
        ({"required": ["a"], "additionalProperties": False}, Code.INVALID_REQUEST, "'a' is required"),
        ({"enum": []}, Code.INVALID_REQUEST, ""),
        ({"type": "integer", "enum": ["a"]}, Code.INVALID_REQUEST, "no value of `enum`"),
        ({"enum": list(range(5000))}, Code.INVALID_REQUEST, "at most 1000"),
        ({"anyOf": [{}], "type": "string"}, Code.UNSUPPORTED_PARAMETER, "together with `type`"),
        ({"anyOf": [False]}, Code.INVALID_REQUEST, "no branch"),
        ({"allOf": [{}, {}]}, Code.UNSUPPORTED_PARAMETER, "merge them"),
        ({"oneOf": [{"type": "number"}, {"type": "integer"}]}, Code.UNSUPPORTED_PARAMETER, "same time"),
        ({"oneOf": [{"const": None}, {"format": "date"}]}, Code.UNSUPPORTED_PARAMETER, "same time"),
        ({"$ref": "#/$defs/x"}, Code.INVALID_REQUEST, "points to nothing"),
        ({"$ref": "#/$defs", "$defs": []}, Code.INVALID_REQUEST, ""),
        ({"$ref": "https://example.org/x"}, Code.UNSUPPORTED_PARAMETER, "inside the schema"),
        ({"$ref": "#"}, Code.INVALID_REQUEST, "leads back to itself"),
        ({"anyOf": [{"$ref": "#"}, {"type": "null"}]}, Code.INVALID_REQUEST, "leads back to itself"),
        ({"properties": {"a": {"$ref": "#"}}, "required": ["a"]}, Code.INVALID_REQUEST, "infinite"),
        ({"items": {"$ref": "#"}, "minItems": 1}, Code.INVALID_REQUEST, "infinite"),
        ({"description": "x" * 70_000}, Code.INVALID_REQUEST, "larger than"),
        ({"$ref": "#/default", "default": {"type": 5}}, Code.INVALID_REQUEST, "#/type"),
        ({"$ref": "#/default", "default": {"minLength": -3}}, Code.INVALID_REQUEST, "#/minLength"),
        (
            {"oneOf": [{"$ref": "#/examples/0"}, {}], "examples": [{"required": 5}]},
            Code.INVALID_REQUEST,
            "#/required",
        ),
        ({"anyOf": [{"$ref": "#/anyOf/" + "9" * 5000}, {}]}, Code.INVALID_REQUEST, "not a JSON Schema"),
        ({"const": {"a": 1}, "properties": {"a": {"$ref": "#/$defs/x"}}}, Code.INVALID_REQUEST, "points to nothing"),
        ({"const": {"a": 1}, "properties": {"a": {"$ref": "#/properties/a"}}}, Code.INVALID_REQUEST, ""),
        (
            {"const": {"a": 1}, "properties": {"a": {"$ref": "#/$defs/x", "$id": "y:z"}}, "$defs": {"x": {}}},
            Code.INVALID_REQUEST,
            "not a JSON Schema",
        ),
        (
            {"const": ["a" * 99 + "!"], "items": {"type": "string", "pattern": "(a+)+$"}},
            Code.UNSUPPORTED_PARAMETER,
            "`pattern`",
        ),
    ],
)
def test_what_is_refused_says_where_and_why(schema: Any, code: Code, says: str) -> None:
    with pytest.raises(Refusal) as caught:
        json_grammar(schema if isinstance(schema, str) else json.dumps(schema))
    assert (caught.value.code, caught.value.param) == (code, "response_format")
    assert says in caught.value.text


def test_a_schema_nested_too_deep_or_too_large_is_refused() -> None:
    deep: Any = {}
    for _ in range(500):
        deep = {"items": deep}
    wide = {"properties": {str(n): {} for n in range(3000)}}
    for schema in (deep, wide):
        with pytest.raises(Refusal):
            json_grammar(json.dumps(schema))
    with pytest.raises(Refusal):
        json_grammar("[" * 30_000 + "]" * 30_000)


def _derived(alternatives: list[str], text: str) -> bool:
    """Whether alternatives of digits derive a text: quotes and spaces aside they are a regular expression."""
    pattern = "|".join(each.replace(" ", "").replace('"."', r"\.").replace('"', "") for each in alternatives)
    return bool(alternatives) and re.fullmatch(pattern, text) is not None


@given(st.integers(-1100, 1100), st.integers(-1100, 1100), st.integers(-1200, 1200))
def test_a_range_of_integers_derives_exactly_those(low: int, high: int, value: int) -> None:
    assert _derived(integers(low, high), str(value)) == (low <= value <= high)


@given(st.integers(-30, 30), st.integers(-30, 30), st.booleans(), st.booleans(), st.decimals(-32, 32, places=2))
def test_a_range_of_numbers_derives_only_those(
    low: int, high: int, open_low: bool, open_high: bool, value: Any
) -> None:
    text = str(value).rstrip("0").rstrip(".") if "." in str(value) else str(value)
    inside = (low < value if open_low else low <= value) and (value < high if open_high else value <= high)
    if text not in {"-0", ""}:
        assert _derived(decimals(low, high, open_low, open_high), text) == inside
