"""OpenAI's Responses API without state: parses a request body into a chat request.

Nothing is stored, so references to an earlier response are rejected by name, and so is `store: true`; an absent
`store` counts as false here. Other fields of OpenAI's API that Forebay does not support are rejected too, unless
their value changes nothing.
"""

from dataclasses import dataclass
from typing import Any, Final

from forebay.wire.openai_fields import (
    Reader,
    anything,
    array_shape,
    boolean,
    decode,
    format_name,
    ignored_text,
    integer,
    invalid,
    json_schema,
    metadata,
    nested,
    number,
    object_shape,
    one_of,
    only,
    read,
    shaped,
    shown,
    text,
    texts,
    unsupported,
)
from forebay.wire.openai_request import ANY_OBJECT_SCHEMA, MESSAGES_MAX, TOKENS_MAX, ChatRequest, SamplingParams


@dataclass(frozen=True, slots=True)
class ResponsesRequest:
    """`POST /v1/responses`. `echo`: fields of the request that the response object repeats."""

    chat: ChatRequest
    echo: dict[str, Any]


def parse_responses(body: bytes) -> ResponsesRequest:
    """Parse a request. Raises `Refusal`."""
    sent = decode(body)
    given = RESPONSES_BODY(sent, "")
    messages: list[dict[str, str]] = given["input"]
    instructions = given.get("instructions")
    if instructions is not None:
        messages.insert(0, {"role": "system", "content": instructions})
    temperature, top_p, limit = given.get("temperature", 1.0), given.get("top_p", 1.0), given.get("max_output_tokens")
    sampling = SamplingParams(
        max_tokens=limit,
        temperature=temperature,
        top_p=top_p,
        schema=given.get("text", {}).get("format"),
    )
    echo = {
        "instructions": instructions,
        "max_output_tokens": limit,
        "metadata": given.get("metadata", {}),
        "parallel_tool_calls": given.get("parallel_tool_calls", True),
        "temperature": temperature,
        "tool_choice": given.get("tool_choice", "auto"),
        "text": {"format": (sent.get("text") or {}).get("format") or {"type": "text"}},
        "top_p": top_p,
        "user": given.get("user"),
    }
    chat = ChatRequest(given["model"], tuple(messages), sampling, stream=given.get("stream", False))
    return ResponsesRequest(chat, echo)


def _input(value: Any, path: str) -> list[dict[str, str]]:
    if type(value) is str:
        return [{"role": "user", "content": value}]
    if type(value) is not list or not 0 < len(value) <= MESSAGES_MAX:
        invalid(path, f"a string or an array of 1 to {MESSAGES_MAX} messages", value)
    return [_item(one, f"{path}[{i}]") for i, one in enumerate(value)]


def _item(value: Any, path: str) -> dict[str, str]:
    kind = value.get("type") if type(value) is dict else None
    if type(kind) is str and kind != "message":
        unsupported(f"{path}.type", f"found {shown(kind)}; this API takes messages only.")
    given = read(value, path, _ITEM, ("role", "content"))
    role = "system" if given["role"] == "developer" else given["role"]  # the role that chat templates know
    return {"role": role, "content": given["content"]}


def _part(value: Any, path: str) -> str:
    kind = value.get("type") if type(value) is dict else None
    if type(kind) is str and kind in ("input_image", "input_file", "input_audio", "refusal"):
        unsupported(f"{path}.type", f"found {shown(kind)}; this model reads text only.")
    part: str = read(value, path, _PART, ("type", "text"))["text"]
    return part


def _format(value: Any, path: str) -> str | None:
    """The schema as text; None for plain text."""
    kind = value.get("type") if type(value) is dict else None
    if kind == "json_schema":
        schema: str = read(value, path, _SCHEMA_FORMAT, ("type", "name", "schema"))["schema"]
        return schema
    kind = read(value, path, _FORMAT, ("type",))["type"]
    return ANY_OBJECT_SCHEMA if kind == "json_object" else None


_ANY_TEXT: Final = text()
_PART: Final[dict[str, Reader]] = {
    "type": one_of("input_text", "output_text"),
    "text": _ANY_TEXT,
    "annotations": anything,
    "logprobs": anything,
    "parsed": anything,  # what OpenAI's clients add to an answer in JSON, and send back with it
    "prompt_cache_breakpoint": only(),
}
shaped(_part, object_shape(_PART, ("type", "text")))
_ITEM: Final[dict[str, Reader]] = {
    "type": one_of("message"),
    "role": one_of("system", "developer", "user", "assistant"),
    "content": texts(_part),
    "id": ignored_text,
    "status": one_of("in_progress", "completed", "incomplete"),
    "phase": one_of("commentary", "final_answer"),
}
_ITEMS: Final = array_shape(object_shape(_ITEM, ("role", "content")), 1, MESSAGES_MAX)
shaped(_input, {"anyOf": [{"type": "string"}, _ITEMS]})
_FORMAT: Final[dict[str, Reader]] = {"type": one_of("text", "json_object", "json_schema")}
_SCHEMA_FORMAT: Final[dict[str, Reader]] = {
    "type": one_of("json_schema"),
    "name": format_name,
    "description": ignored_text,
    "schema": json_schema,
    "strict": boolean,
}
_FORMAT_SHAPES: Final = [
    object_shape(_FORMAT, ("type",)),
    object_shape(_SCHEMA_FORMAT, ("type", "name", "schema")),
]
shaped(_format, {"anyOf": _FORMAT_SHAPES})
_REQUEST: Final[dict[str, Reader]] = {
    "model": text(1),
    "input": _input,
    "instructions": _ANY_TEXT,
    "max_output_tokens": integer(1, TOKENS_MAX),
    "temperature": number(0, 2),
    "top_p": number(0, 1, above=True),
    "stream": boolean,
    "stream_options": nested({"include_obfuscation": only(False)}),
    "text": nested({"format": _format, "verbosity": only("medium")}),
    "metadata": metadata,
    "user": _ANY_TEXT,
    "safety_identifier": ignored_text,
    "prompt_cache_key": ignored_text,
    "background": only(False),
    "context_management": only([]),
    "conversation": only(),
    "include": only([]),
    "max_tool_calls": integer(1, TOKENS_MAX),
    "moderation": only(),
    "parallel_tool_calls": boolean,
    "previous_response_id": only(),
    "prompt": only(),
    "prompt_cache_options": nested({"mode": only("implicit"), "ttl": only()}),
    "prompt_cache_retention": only("in_memory"),
    "reasoning": nested({"effort": only("none"), "summary": only(), "generate_summary": only()}),
    "service_tier": only("auto", "default"),
    "store": only(False),
    "tool_choice": only("none", "auto"),
    "tools": only([]),
    "top_logprobs": only(0),
    "truncation": only("disabled"),
}
RESPONSES_BODY: Final = nested(_REQUEST, ("model", "input"))
