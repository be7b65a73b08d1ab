"""Tokenization requests: what is accepted and what is rejected."""

import json
from typing import Any

import msgspec
import pytest

from forebay.core.errors import Code, Refusal
from forebay.wire.apis import tokens as wire

HI = [{"role": "user", "content": "hi"}]


def body(**fields: Any) -> bytes:
    return msgspec.json.encode({"model": "m"} | fields)


def test_text_or_messages_are_accepted() -> None:
    assert wire.parse_tokenize(body(prompt="a")) == wire.TokenizeRequest("m", "a")
    assert wire.parse_tokenize(body(prompt=None, messages=HI, add_special_tokens=False)) == wire.TokenizeRequest(
        "m", ({"role": "user", "content": "hi"},), special=False
    )
    assert wire.parse_detokenize(body(tokens=[1, 2])) == wire.DetokenizeRequest("m", (1, 2))


@pytest.mark.parametrize(
    ("parse", "fields", "param"),
    [
        (wire.parse_tokenize, {}, "prompt"),
        (wire.parse_tokenize, {"prompt": ""}, "prompt"),
        (wire.parse_tokenize, {"prompt": 5}, "prompt"),
        (wire.parse_tokenize, {"prompt": ["a"]}, "prompt"),
        (wire.parse_tokenize, {"prompt": "a", "messages": HI}, "messages"),
        (wire.parse_tokenize, {"messages": "hi"}, "messages"),
        (wire.parse_tokenize, {"prompt": "a", "add_special_tokens": "no"}, "add_special_tokens"),
        (wire.parse_tokenize, {"prompt": "a", "colour": 1}, "colour"),
        (wire.parse_tokenize, {"prompt": "a", "model": None}, "model"),
        (wire.parse_detokenize, {}, "tokens"),
        (wire.parse_detokenize, {"tokens": []}, "tokens"),
        (wire.parse_detokenize, {"tokens": "1"}, "tokens"),
        (wire.parse_detokenize, {"tokens": [1, "2"]}, "tokens[1]"),
        (wire.parse_detokenize, {"tokens": [1, 2**31]}, "tokens[1]"),
        (wire.parse_detokenize, {"tokens": [1], "prompt": "a"}, "prompt"),
    ],
    ids=lambda value: getattr(value, "__name__", str(value)),
)
def test_invalid_field_is_rejected_by_name(parse: Any, fields: dict[str, Any], param: str) -> None:
    with pytest.raises(Refusal) as caught:
        parse(body(**fields))
    assert (caught.value.code, caught.value.param) == (Code.INVALID_REQUEST, param)
    assert param in caught.value.text


def test_responses_have_the_format_of_vllm() -> None:
    assert json.loads(wire.tokenize_body((5, 6), 9)) == {"tokens": [5, 6], "count": 2, "max_model_len": 9}
    assert json.loads(wire.detokenize_body("é")) == {"prompt": "é"}
