"""Anthropic's Messages API: parses a request body into a chat request.

Follows Anthropic's public API for text. Fields of that API that Forebay does not support are rejected by name, unless
their value changes nothing. Cache hints are accepted and not needed: common prefixes are always read from the cache.
"""

from typing import Any, Final

from forebay.wire.apis.tokens import TokenizeRequest
from forebay.wire.openai_fields import (
    Reader,
    array_shape,
    boolean,
    decode,
    ignored_text,
    integer,
    invalid,
    json_schema,
    nested,
    number,
    object_shape,
    one_of,
    only,
    read,
    shape_of,
    shaped,
    shown,
    text,
    texts,
    unsupported,
)
from forebay.wire.openai_request import MESSAGES_MAX, STOP_CHARS_MAX, TOKENS_MAX, ChatRequest, SamplingParams

STOPS_MAX: Final = 16


def parse_messages(body: bytes) -> ChatRequest:
    """Parse a message request. Raises `Refusal`."""
    given = MESSAGES_BODY(decode(body), "")
    messages = _conversation(given)
    sampling = SamplingParams(
        max_tokens=given["max_tokens"],
        temperature=given.get("temperature", 1.0),
        top_p=given.get("top_p", 1.0),
        top_k=given.get("top_k"),
        stop=given.get("stop_sequences", ()),
        schema=given.get("output_config", {}).get("format"),
    )
    return ChatRequest(given["model"], messages, sampling, stream=given.get("stream", False))


def parse_count(body: bytes) -> TokenizeRequest:
    """Parse a message request whose prompt is to be counted; `max_tokens` is optional. Raises `Refusal`."""
    given = COUNT_BODY(decode(body), "")
    return TokenizeRequest(given["model"], _conversation(given))


def _conversation(given: dict[str, Any]) -> tuple[dict[str, str], ...]:
    """The messages in the order in which the model reads them."""
    messages: list[dict[str, str]] = given["messages"]
    if messages[-1]["role"] == "assistant":
        unsupported(
            "messages", "the last one is the assistant's, and this API does not continue it; end with the user's."
        )
    if "system" in given:
        messages.insert(0, {"role": "system", "content": given["system"]})
    return tuple(messages)


def _messages(value: Any, path: str) -> list[dict[str, str]]:
    """Consecutive messages of one role are merged into one turn."""
    if type(value) is not list or not 0 < len(value) <= MESSAGES_MAX:
        invalid(path, f"an array of 1 to {MESSAGES_MAX} messages", value)
    turns: list[dict[str, str]] = []
    for i, one in enumerate(value):
        message = read(one, f"{path}[{i}]", _MESSAGE, ("role", "content"))
        if turns and turns[-1]["role"] == message["role"]:
            turns[-1]["content"] += "\n" + message["content"]
        else:
            turns.append(message)
    return turns


def _block(value: Any, path: str) -> str:
    kind = value.get("type") if type(value) is dict else None
    if type(kind) is str and kind != "text":
        unsupported(f"{path}.type", f"found {shown(kind)}; this model reads text only.")
    block: str = read(value, path, _BLOCK, ("type", "text"))["text"]
    return block


def _stop_sequences(value: Any, path: str) -> tuple[str, ...]:
    if type(value) is not list or len(value) > STOPS_MAX:
        invalid(path, f"an array of at most {STOPS_MAX} strings", value)
    return tuple([_STOP(one, f"{path}[{i}]") for i, one in enumerate(value)])


def _format(value: Any, path: str) -> str:
    schema: str = read(value, path, _FORMAT, ("type", "schema"))["schema"]
    return schema


_STOP: Final = text(1, STOP_CHARS_MAX)
shaped(_stop_sequences, array_shape(shape_of(_STOP), 0, STOPS_MAX))
_CACHE_CONTROL: Final = nested({"type": one_of("ephemeral"), "ttl": one_of("5m", "1h")}, ("type",))
_BLOCK: Final[dict[str, Reader]] = {
    "type": one_of("text"),
    "text": text(),
    "cache_control": _CACHE_CONTROL,
    "citations": only([]),
}
shaped(_block, object_shape(_BLOCK, ("type", "text")))
_MESSAGE: Final[dict[str, Reader]] = {
    "role": one_of("user", "assistant", "system"),
    "content": texts(_block, "text blocks"),
}
shaped(_messages, array_shape(object_shape(_MESSAGE, ("role", "content")), 1, MESSAGES_MAX))
_FORMAT: Final[dict[str, Reader]] = {"type": one_of("json_schema"), "schema": json_schema}
shaped(_format, object_shape(_FORMAT, ("type", "schema")))
_REQUEST: Final[dict[str, Reader]] = {
    "model": text(1),
    "max_tokens": integer(1, TOKENS_MAX),
    "messages": _messages,
    "system": texts(_block, "text blocks"),
    "temperature": number(0, 1),
    "top_p": number(0, 1, above=True),
    "top_k": integer(1, TOKENS_MAX),
    "stop_sequences": _stop_sequences,
    "stream": boolean,
    "metadata": nested({"user_id": ignored_text}),
    "output_config": nested({"format": _format, "effort": only("high")}),
    "cache_control": _CACHE_CONTROL,
    "container": only(),
    "context_management": only(),
    "diagnostics": only(),
    "inference_geo": only(),
    "mcp_servers": only([]),
    "service_tier": one_of("auto", "standard_only"),
    "speed": only("standard"),
    "thinking": only({"type": "disabled"}),
    "tool_choice": only({"type": "none"}, {"type": "auto"}),
    "tools": only([]),
}
MESSAGES_BODY: Final = nested(_REQUEST, ("model", "max_tokens", "messages"))
COUNT_BODY: Final = nested(_REQUEST, ("model", "messages"))
