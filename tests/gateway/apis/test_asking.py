"""What routing reads of a request is what the model will read, in its order, whichever API it comes by."""

from collections.abc import Callable
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from forebay.core.errors import Code, Refusal
from forebay.core.prefix.blocks import BLOCK_BYTES, blocks
from forebay.core.routing.speed import Lengths
from forebay.core.tenancy import Quota, Tenant
from forebay.gateway.asking import expected_tokens, most_tokens
from forebay.wire.apis.request_fields import prompt_text, request_fields
from forebay.wire.openai_request import parse_completion

MESSAGES = [{"role": "user", "content": "hi"}]
_encode = msgspec.json.encode


def text(**fields: Any) -> bytes:
    return bytes(request_fields(_encode({"model": "m"} | fields)).text)


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({"messages": MESSAGES}, _encode(MESSAGES)),
        ({"prompt": "p"}, b'"p"'),
        ({"input": ["a"]}, b'["a"]'),
        ({"messages": MESSAGES, "system": "be"}, b'"be"' + _encode(MESSAGES)),
        ({"system": [{"type": "text", "text": "be"}], "messages": MESSAGES},
         b'[{"type":"text","text":"be"}]' + _encode(MESSAGES)),
        ({"input": "hi", "instructions": "be"}, b'"be""hi"'),
        ({"instructions": "be"}, b'"be"'),
        ({}, b""),
    ],
    ids=str,
)  # fmt: skip
def test_prompt_blocks_follow_the_order_in_which_the_model_reads_them(
    fields: dict[str, Any], expected: bytes
) -> None:
    assert text(**fields) == expected
    assert text(**dict(reversed(fields.items()))) == expected
    assert bytes(prompt_text(_encode({"model": "m"} | fields))) == expected, "the worker reads the same"


CROWD = b'{"model":"m","prompt":[%b[1]]}' % (b"[1]," * 300_000)
CODE = _encode({"model": "m", "prompt": '{"a": ["b\\"]}\n' * 100_000})


@pytest.mark.parametrize("read", [request_fields, parse_completion], ids=["gateway", "worker"])
def test_long_bodies_with_very_many_arrays_are_refused_unread(read: Callable[[bytes], Any]) -> None:
    with pytest.raises(Refusal) as caught:
        read(CROWD)
    assert (caught.value.code, "100000 arrays" in caught.value.text) == (Code.INVALID_REQUEST, True)
    read(CODE)
    for rest in (b'"' + rb"\"" * 2_000_000, b'{"' * 1_000_000):  # no quadratic search for the end of a text
        with pytest.raises(Refusal):
            read(CROWD[:-1] + rest)


@given(st.text(min_size=1), st.text(min_size=1), st.booleans())
def test_prompt_length_is_the_sum_of_its_parts(first: str, second: str, message: bool) -> None:
    first_name, second_name = ("system", "messages") if message else ("instructions", "input")
    whole = text(**{second_name: second, first_name: first})
    assert whole == _encode(first) + _encode(second)


def test_prompts_with_a_common_prefix_share_its_blocks() -> None:
    def hashes(first: str, last: str) -> tuple[int, ...]:
        body = {"model": "m", "messages": [{"role": "user", "content": last}], "system": first}
        return blocks(request_fields(_encode(body)).text, "m")

    long = "x" * 4 * BLOCK_BYTES
    one, other = hashes(long, "a" * BLOCK_BYTES), hashes(long, "b" * BLOCK_BYTES)
    assert (len(one), one[:4]) == (5, other[:4])
    assert one[4] != other[4]
    assert hashes("y" + long, "a")[0] != one[0]


@pytest.mark.parametrize("name", ["max_tokens", "max_completion_tokens", "max_output_tokens"])
@pytest.mark.parametrize(("limit", "counts"), [(7, True), (10**9, False), (-1, False), (1.5, False), (None, False)])
def test_expected_output_is_the_longest_requested_answer(name: str, limit: Any, counts: bool) -> None:
    lengths = Lengths()
    plain = expected_tokens(request_fields(_encode({"model": "m", "input": "x" * 400})), lengths)
    asked = expected_tokens(request_fields(_encode({"model": "m", "input": "x" * 400, name: limit})), lengths)
    assert asked == (plain - lengths.output_tokens + 7 if counts else plain)
    assert plain > lengths.output_tokens


def test_admission_reserves_the_longest_possible_answer() -> None:
    lengths = Lengths()
    for tokens in (100, 900, *[100] * 20):
        lengths.learn(400, 100, tokens)
        lengths.learn_longest("team", tokens)
    team, small = Tenant("team"), Tenant("team", limits=Quota(tokens_per_min=600, tokens_per_day=500))
    plain = {"model": "m", "input": "x" * 398}
    cases: list[tuple[dict[str, Any], int]] = [
        ({}, round(lengths.longest_tokens("team"))),
        ({"max_tokens": 5000}, 5000), ({"max_tokens": 5000, "n": 3}, 15_000),
        ({"max_tokens": 10, "best_of": 4}, 40), ({"n": "x", "max_tokens": 10}, 10), ({"n": -3, "max_tokens": 10}, 10),
        ({"max_completion_tokens": None, "max_tokens": 5000}, 5000),
    ]  # fmt: skip
    assert 700 < lengths.longest_tokens("team") <= 900
    for more, answer in cases:
        assert most_tokens(request_fields(_encode({**plain, **more})), lengths, team) == lengths.tokens(400) + answer
    assert lengths.longest_tokens("other") == 256, "the long answers of one tenant are nothing to another"
    assert most_tokens(request_fields(_encode(plain)), lengths, small) == 500, "no more than its limits let in at all"
    asked = request_fields(_encode({**plain, "max_tokens": 5000}))
    assert most_tokens(asked, lengths, small) > 5000, "but for what it asks for itself"
    assert most_tokens(request_fields(_encode({**plain, "input": "x" * 9998})), lengths, small) == lengths.tokens(
        10_000
    )


@pytest.mark.parametrize(
    ("prompt", "prompts"),
    [
        ("[a, b]", 1), ([1, 2, 3], 1), ([], 1), (["a"], 1), (["a", "b", "c"], 3), ([[1, 2], [3]], 2), (None, 1),
        ({"a": ["b", "c"]}, 1),
    ],
    ids=str,
)  # fmt: skip
def test_completion_with_several_prompts_reserves_answers_for_each(prompt: Any, prompts: int) -> None:
    lengths, body = Lengths(), {"model": "m", "prompt": prompt, "max_tokens": 100, "n": 2}
    for encoded in (_encode(body), msgspec.json.format(_encode(body), indent=2)):
        request = request_fields(encoded)
        assert request.choices == 2 * prompts
        assert most_tokens(request, lengths, Tenant("team")) == lengths.tokens(request.text_bytes) + 200 * prompts


def test_system_prompt_has_the_same_length_inside_and_outside_of_messages() -> None:
    lengths = Lengths()
    inside = {"model": "m", "messages": [{"role": "system", "content": "s" * 9000}, *MESSAGES]}
    outside = {"model": "m", "messages": MESSAGES, "system": "s" * 9000}
    assert expected_tokens(request_fields(_encode(inside)), lengths) == pytest.approx(
        expected_tokens(request_fields(_encode(outside)), lengths), rel=0.01
    )
