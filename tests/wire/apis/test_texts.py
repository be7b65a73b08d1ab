"""Prompt and answer texts, extracted from the bodies of every API."""

from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from forebay.wire.apis.texts import end_user, prompt, response_text

CALL = {"id": "1", "type": "function", "function": {"name": "f", "arguments": "{}"}}


def of(value: Any) -> bytes:
    return msgspec.json.encode(value)


@pytest.mark.parametrize(
    ("answer", "text"),
    [
        (
            {"choices": [{"message": {"role": "assistant", "content": "Yes."}}, {"message": {"content": "No."}}]},
            "Yes.",
        ),
        ({"choices": [{"text": "Yes."}]}, "Yes."),
        ({"choices": [{"message": {"content": ""}}]}, ""),
        ({"choices": [{"message": {"content": None, "tool_calls": [CALL]}}]}, None),
        ({"choices": [{"message": {"content": "I ask.", "tool_calls": [CALL]}}]}, None),
        ({"content": [{"type": "text", "text": "Ye"}, {"type": "text", "text": "s."}]}, "Yes."),
        ({"content": [{"type": "text", "text": "I ask."}, {"type": "tool_use", "id": "1"}]}, None),
        ({"output": [{"type": "message", "content": [{"type": "output_text", "text": "Yes."}]}]}, "Yes."),
        ({"output": [{"type": "function_call", "name": "f"}]}, None),
        ({"object": "list", "data": []}, None),
        ({"choices": 3}, None),
        ("text", None),
    ],
)
def test_answer_text_is_extracted_from_every_api(answer: Any, text: str | None) -> None:
    assert response_text(of(answer)) == text


@pytest.mark.parametrize(
    ("body", "text", "schema"),
    [
        ({"messages": [{"role": "user", "content": "Why?"}]}, "Why?", ""),
        (
            {"messages": [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Why?"}]},
            "system: Be brief.\nuser: Why?",
            "",
        ),
        (
            {"messages": [{"role": "user", "content": [{"type": "text", "text": "W"}, {"type": "image_url"}]}]},
            "W",
            "",
        ),
        ({"prompt": "Once"}, "Once", ""),
        ({"prompt": ["Once", "Twice"]}, "Once\nTwice", ""),
        ({"prompt": "a", "response_format": {"type": "json_object"}}, "a", "{}"),
        ({"prompt": "a", "response_format": {"type": "text"}}, "a", ""),
        ({"prompt": "a", "response_format": {"type": "json_schema"}}, "a", "{}"),
        ({"prompt": "a", "response_format": {"type": "json_schema", "json_schema": {"schema": {}}}}, "a", "{}"),
        ({"prompt": "a", "response_format": {"type": "json_schema", "json_schema": {"schema": [1]}}}, "a", "[1]"),
        ({"input": "x"}, "", ""),
        ({"messages": 3}, "", ""),
    ],
)  # fmt: skip
def test_prompt_is_extracted_with_its_output_format(body: Any, text: str, schema: str) -> None:
    assert prompt(of(body)) == (text, schema)


@pytest.mark.parametrize(
    ("body", "name"),
    [(b'{"user":"anna"}', "anna"), (b"{}", ""), (b'{"user":3}', ""), (b"{", ""), (b"[" * 100_000, "")],
)  # fmt: skip
def test_end_user_is_read_from_the_user_field(body: bytes, name: str) -> None:
    assert end_user(body) == name


@given(st.binary())
def test_any_bytes_are_handled(body: bytes) -> None:
    assert response_text(body) is None or body
    assert prompt(body) is not None
    assert end_user(body) is not None
