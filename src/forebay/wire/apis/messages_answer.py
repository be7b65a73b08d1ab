"""Anthropic's Messages API: a response as bytes, whole or as the events of a stream."""

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import msgspec

from forebay.core.errors import Code
from forebay.wire.errors import MESSAGES, error_event
from forebay.wire.openai_answer import NOTHING_USED, Choice, Head, Logprob, Usage

_encode = msgspec.json.Encoder().encode
_BEFORE = (
    b'event: content_block_delta\ndata: {"type":"content_block_delta","index":0,"delta":{"type":"text_delta","text":'
)
_AFTER = b"}}\n\n"


class MessagesAnswer:
    """Writes the response of `/v1/messages`: one choice, which is one text block.

    `events`: how many events of the stream another replica has already sent.
    """

    names: ClassVar[Mapping[str, str]] = {
        "prompt": "messages",
        "response_format": "output_config.format",
        "schema": "output_config.format",
        "stop": "stop_sequences",
    }

    def __init__(self, head: Head, events: int = 0) -> None:
        self._head = head
        self._events = events
        self._reason = ""
        self._stop: str | None = None

    def opening(self, index: int, usage: Usage = NOTHING_USED) -> bytes:
        """The start events: the empty message and its block. `usage`: the prompt length, 0 if not known yet.

        Of a continued stream: those that have not been sent yet.
        """
        start = {"type": "message_start", "message": self._message([], usage)}
        block = {"type": "content_block_start", "index": 0, "content_block": {"type": "text", "text": ""}}
        return b"".join((_event(start), _event(block))[self._events :])

    def delta(self, index: int, text: str, tokens: Sequence[Logprob] = ()) -> bytes:
        """New text."""
        return _BEFORE + _encode(text) + _AFTER

    def finish(self, index: int, reason: str, stop: str | None) -> bytes:
        """The block is complete."""
        self._reason, self._stop = _stop_reason(reason, stop), stop
        return _event({"type": "content_block_stop", "index": 0})

    def end(self, usage: Usage) -> bytes:
        """The stop reason, the token counts, and the end of the stream."""
        delta = {"stop_reason": self._reason, "stop_sequence": self._stop}
        last = _event({"type": "message_delta", "delta": delta, "usage": _usage(usage)})
        return last + _event({"type": "message_stop"})

    def error(self, code: Code, text: str) -> bytes:
        """The event that ends a stream with an error."""
        return error_event(code, text, MESSAGES)

    def whole(self, choices: Sequence[Choice], usage: Usage) -> bytes:
        """The whole message."""
        (choice,) = choices
        self._reason, self._stop = _stop_reason(choice.finish_reason, choice.stop), choice.stop
        return _encode(self._message([{"type": "text", "text": choice.text}], usage))

    def _message(self, content: list[dict[str, str]], usage: Usage) -> dict[str, Any]:
        return {
            "id": self._head.id,
            "type": "message",
            "role": "assistant",
            "model": self._head.model,
            "content": content,
            "stop_reason": self._reason or None,
            "stop_sequence": self._stop,
            "usage": _usage(usage),
        }


def count_body(tokens: int) -> bytes:
    """The body of `/v1/messages/count_tokens`: the prompt length of a message request."""
    return _encode({"input_tokens": tokens})


def _stop_reason(reason: str, stop: str | None) -> str:
    if reason == "length":
        return "max_tokens"
    return "end_turn" if stop is None else "stop_sequence"


def _usage(usage: Usage) -> dict[str, int | None]:
    """Anthropic's `input_tokens` exclude cached ones; if the cache reports nothing, none are counted as cached."""
    return {
        "input_tokens": usage.prompt - (usage.cached or 0),
        "cache_creation_input_tokens": None,
        "cache_read_input_tokens": usage.cached,
        "output_tokens": usage.completion,
    }


def _event(data: dict[str, Any]) -> bytes:
    kind: str = data["type"]
    return b"event: %b\ndata: %b\n\n" % (kind.encode(), _encode(data))
