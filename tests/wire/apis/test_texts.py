"""The text of questions and answers, out of bodies of every API."""

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
def test_the_text_of_an_answer_is_found_in_every_api(answer: Any, text: str | None) -> None:
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
def test_the_question_is_found_with_what_the_answer_is_to_look_like(body: Any, text: str, schema: str) -> None:
    assert prompt(of(body)) == (text, schema)


@pytest.mark.parametrize(
    ("body", "name"),
    [(b'{"user":"anna"}', "anna"), (b"{}", ""), (b'{"user":3}', ""), (b"{", ""), (b"[" * 100_000, "")],
)  # fmt: skip
def test_a_caller_is_known_by_its_name_if_it_says_one(body: bytes, name: str) -> None:
    assert end_user(body) == name


@given(st.binary())
def test_no_bytes_are_too_strange(body: bytes) -> None:
    assert response_text(body) is None or body
    assert prompt(body) is not None
    assert end_user(body) is not None
