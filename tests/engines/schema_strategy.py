"""JSON Schemas for property tests: mostly of the supported kind, sometimes contradictory or with other keywords."""

from typing import Any

from hypothesis import strategies as st

_NAMES = st.sampled_from(("a", "b", "name", 'quo"te', "new\nline", "é🌊", ""))
_CONSTANTS = st.one_of(st.none(), st.booleans(), st.integers(-99, 99), st.text(max_size=5), st.just({"k": [1]}))
_COUNTS = st.integers(0, 6)
_LEAVES = st.one_of(
    st.just({}),
    st.just(True),
    st.fixed_dictionaries({"enum": st.lists(_CONSTANTS, min_size=1, max_size=4)}),
    st.fixed_dictionaries({"const": _CONSTANTS}),
    st.fixed_dictionaries({"type": st.just("string")}, optional={"minLength": _COUNTS, "maxLength": _COUNTS}),
    st.fixed_dictionaries(
        {"type": st.sampled_from(("integer", "number"))},
        optional={
            "minimum": st.integers(-120, 120),
            "maximum": st.integers(-120, 1200),
            "exclusiveMinimum": st.integers(-10, 10),
        },
    ),
    st.fixed_dictionaries({"type": st.sampled_from(("boolean", "null", "object", "array"))}),
    st.sampled_from(
        (
            {"$ref": "#/$defs/d"},
            {"$ref": "#"},
            {"pattern": "a"},
            False,
            {"type": ["string", "null"]},
            {"format": "date"},
        )
    ),
)


def _nested(inner: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    return st.one_of(
        st.fixed_dictionaries(
            {"type": st.just("object"), "properties": st.dictionaries(_NAMES, inner, max_size=4)},
            optional={
                "required": st.lists(_NAMES, unique=True, max_size=3),
                "additionalProperties": st.one_of(st.just(False), inner),
            },
        ),
        st.fixed_dictionaries({"type": st.just("object"), "additionalProperties": inner}),
        st.fixed_dictionaries(
            {"type": st.just("array")},
            optional={
                "items": inner,
                "prefixItems": st.lists(inner, min_size=1, max_size=3),
                "minItems": _COUNTS,
                "maxItems": _COUNTS,
            },
        ),
        st.fixed_dictionaries({"anyOf": st.lists(inner, min_size=1, max_size=3)}),
        st.fixed_dictionaries({"oneOf": st.lists(inner, min_size=1, max_size=3)}),
        st.fixed_dictionaries({"allOf": st.lists(inner, min_size=1, max_size=1), "title": st.text(max_size=3)}),
    )


def schemas() -> st.SearchStrategy[Any]:
    """A schema, a third of them with a definition to refer to."""
    nested = st.recursive(_LEAVES, _nested, max_leaves=8)
    with_definition = st.builds(
        lambda body, d: {**body, "$defs": {"d": d}} if isinstance(body, dict) else body, nested, nested
    )
    return st.one_of(nested, nested, with_definition)
