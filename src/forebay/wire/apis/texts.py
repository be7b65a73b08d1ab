"""Extracts prompt and response text from whole bodies of every text API.

Not on the request path: used for the few requests that are compared during a rollout.
"""

from typing import NamedTuple

import msgspec

from forebay.wire.apis.prompt import NOTHING
from forebay.wire.documents import UNREADABLE


class PromptText(NamedTuple):
    """A prompt. `schema` is the JSON schema that the response must match: empty if none, `{}` if any JSON is
    allowed."""

    text: str
    schema: str = ""


class _Part(msgspec.Struct):
    type: str = ""
    text: str | None = None


class _Turn(msgspec.Struct):
    role: str = ""
    content: str | list[_Part] | None = None
    tool_calls: list[msgspec.Raw] | None = None


class _Named(msgspec.Struct):
    schema: msgspec.Raw = NOTHING


class _Format(msgspec.Struct):
    type: str = ""
    json_schema: _Named | None = None


class _Question(msgspec.Struct):
    messages: list[_Turn] = []
    prompt: str | list[str] = ""
    response_format: _Format | None = None


class _Choice(msgspec.Struct):
    message: _Turn | None = None
    text: str | None = None


class _Answer(msgspec.Struct):
    choices: list[_Choice] = []
    """OpenAI's chat and text completions."""
    content: list[_Part] = []
    """Anthropic's Messages."""
    output: list[_Turn] = []
    """OpenAI's Responses."""


class _Caller(msgspec.Struct):
    user: str = ""


_question = msgspec.json.Decoder(_Question).decode
_answer = msgspec.json.Decoder(_Answer).decode
_caller = msgspec.json.Decoder(_Caller).decode


def response_text(body: bytes) -> str | None:
    """The text of a whole response, its first choice; None if it is not text only, such as a tool call."""
    try:
        answer = _answer(body)
    except UNREADABLE:
        return None
    if answer.choices:
        choice = answer.choices[0]
        turns = [choice.message] if choice.message is not None else [_Turn(content=choice.text)]
    else:
        turns = answer.output or [_Turn(content=answer.content or None)]
    texts = [_text(turn) for turn in turns]
    return None if None in texts else "".join(text for text in texts if text is not None)


def prompt(body: bytes) -> PromptText:
    """The prompt of a chat or completion request; an empty one if the body is neither."""
    try:
        question = _question(body)
    except UNREADABLE:
        return PromptText("")
    turns = [(turn.role, _text(turn) or "") for turn in question.messages]
    prompt = question.prompt if isinstance(question.prompt, str) else "\n".join(question.prompt)
    text = prompt or (turns[0][1] if len(turns) == 1 else "\n".join(f"{role}: {said}" for role, said in turns))
    return PromptText(text, _schema(question.response_format))


def end_user(body: bytes) -> str:
    """The end user of a request, from its field `user`; empty if absent."""
    try:
        return _caller(body).user
    except UNREADABLE:
        return ""


def _text(turn: _Turn) -> str | None:
    content = turn.content
    if turn.tool_calls or content is None:
        return None
    if isinstance(content, str):
        return content
    texts = [part.text for part in content if part.type in ("text", "output_text", "input_text")]
    return "".join(text or "" for text in texts) if len(texts) == len(content) or turn.role == "user" else None


def _schema(wanted: _Format | None) -> str:
    if wanted is None or wanted.type not in ("json_object", "json_schema"):
        return ""
    schema = bytes(wanted.json_schema.schema) if wanted.json_schema is not None else b""
    return schema.decode() or "{}"
