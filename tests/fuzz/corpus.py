"""Strategies that begin with something valid and damage it: random bytes alone never get past the first check."""

import json
from collections.abc import Callable, Sequence
from copy import deepcopy
from itertools import pairwise
from typing import Any, TypeVar

from hypothesis import strategies as st

T = TypeVar("T")
DEEP = 10_000
"""Nesting that no recursive reader survives."""
ODD_BYTES = (b"\r", b"\n", b"\x00", b":", b" ", b"\xff", b"9", b"{", b'"', b"\xed\xa0\x80", b"\\ud800")
ODD_VALUES: tuple[Any, ...] = (
    None, True, False, 0, -1, 1, 0.5, -0.0, 1e308, 2**31, 2**53, 2**63, -(2**63), 2**64, 10**30, "", "x", "\x00", "é",
    "a" * 5000, [], [[]], [0], {}, {"type": "text"}, {"": {}}, [None] * 3, {"a": [{"b": [{"c": {}}]}]},
)  # fmt: skip

cuts = st.lists(st.integers(0, 3000), max_size=12)


def pieces(data: bytes, cuts: Sequence[int]) -> list[bytes]:
    """The data, cut at these places, without empty pieces."""
    marks = [0, *sorted({min(cut, len(data)) for cut in cuts}), len(data)]
    return [part for a, b in pairwise(marks) if (part := data[a:b])]


@st.composite
def mutated(draw: st.DrawFn, seeds: Sequence[bytes], words: Sequence[bytes] = ()) -> bytes:
    """Some of the seeds, one after the other, with a few edits; `words` are put in whole."""
    data = bytearray(b"".join(draw(st.lists(st.sampled_from(seeds), min_size=1, max_size=3))))
    for _ in range(draw(st.integers(0, 8))):
        at = draw(st.integers(0, len(data)))
        match draw(st.integers(0, 5)):
            case 0:
                data[at : at + draw(st.integers(1, 16))] = b""
            case 1:
                data[at:at] = draw(st.binary(max_size=4))
            case 2:
                data[at : at + 1] = draw(st.sampled_from(ODD_BYTES))
            case 3:
                data[at:at] = draw(st.sampled_from([*words, b"0", b"\n"]))
            case 4:  # a piece again, elsewhere
                data[at:at] = data[draw(st.integers(0, len(data))) :][: draw(st.integers(1, 64))]
            case _:
                del data[at:]
    return bytes(data)


@st.composite
def damaged(draw: st.DrawFn, seeds: Sequence[Any], strangers: Sequence[Any] = ()) -> Any:
    """One of the JSON values with some of its parts replaced, removed, doubled or added; `strangers` may come in."""
    value = deepcopy(draw(st.sampled_from(seeds)))
    odd = st.sampled_from([*ODD_VALUES, *strangers]).map(deepcopy)
    for _ in range(draw(st.integers(0, 5))):
        places = list(_places(value))
        if not places:
            return draw(odd)
        holder, key = draw(st.sampled_from(places))
        match draw(st.integers(0, 4)):
            case 0 | 1:
                holder[key] = draw(odd)
            case 2:
                del holder[key]
            case 3 if isinstance(holder, list):
                holder.insert(key, deepcopy(holder[key]))
            case 3:
                holder[draw(st.sampled_from(["", "x", "type", "content", "model", "é"]))] = draw(odd)
            case _:
                holder[key] = [holder[key]]
    return value


def json_bytes(seeds: Sequence[Any], strangers: Sequence[Any] = ()) -> st.SearchStrategy[bytes]:
    """Bodies: well-formed ones with damaged values, damaged bytes, nesting without end, anything at all."""
    whole = [encoded(seed) for seed in seeds]
    return st.one_of(
        damaged(seeds, strangers).map(encoded),
        mutated(whole, (b'{"', b"[", b",", b"null", b"1e400", b'"model":')),
        st.sampled_from(whole).map(_nested),
        st.binary(max_size=64),
    )


def encoded(value: Any) -> bytes:
    """A value as JSON, integers of any size included."""
    return json.dumps(value).encode()


def survives(read: Callable[[bytes], T], data: bytes, *expected: type[Exception]) -> T | None:
    """What a reader makes of bytes; None if it refuses them in a way that it promises."""
    try:
        return read(data)
    except expected:
        return None


def _nested(body: bytes) -> bytes:
    return body[:-1] + b',"deep":' + b"[" * DEEP + b"]" * DEEP + b"}"


def _places(value: Any) -> Any:
    """Every (container, key) inside of a value."""
    if isinstance(value, dict):
        for key in list(value):
            yield value, key
            yield from _places(value[key])
    elif isinstance(value, list):
        for at, each in enumerate(value):
            yield value, at
            yield from _places(each)
