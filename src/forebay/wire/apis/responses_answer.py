"""OpenAI's Responses API: a response as bytes, whole or as the events of a stream."""

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import msgspec

from forebay.core.errors import Code
from forebay.wire.errors import RESPONSES, error_event
from forebay.wire.openai_answer import NOTHING_USED, Choice, Head, Logprob, Usage

_encode = msgspec.json.Encoder().encode


class ResponsesAnswer:
    """Writes the response of `/v1/responses`: one message with one part. `item_id` is the message's id.

    `echo`: fields of the request that the response repeats. `said` and `events`: the text and the number of events of
    a stream that another replica has begun.
    """

    names: ClassVar[Mapping[str, str]] = {
        "max_tokens": "max_output_tokens",
        "prompt": "input",
        "response_format": "text.format",
        "schema": "text.format",
    }

    def __init__(self, head: Head, item_id: str, echo: Mapping[str, Any], said: str = "", events: int = 0) -> None:
        self._head = head
        self._item_id = item_id
        self._echo = echo
        self._begun = events
        self._events = 0
        self._texts = [said]
        self._reason = ""
        self._place = {"item_id": item_id, "output_index": 0, "content_index": 0}
        place = _encode(self._place)[1:-1]
        self._before = b"event: response.output_text.delta\ndata: {" + place + b',"logprobs":[],"delta":'
        self._after = b',"type":"response.output_text.delta","sequence_number":%d}\n\n'

    def opening(self, index: int, usage: Usage = NOTHING_USED) -> bytes:
        """The start events: empty response, message and part; of a continued stream, those not sent yet."""
        response = self._response("in_progress", [], None)
        item = self._item("in_progress", [])
        events = (
            self._event("response.created", response=response),
            self._event("response.in_progress", response=response),
            self._event("response.output_item.added", output_index=0, item=item),
            self._event("response.content_part.added", **self._place, part=_part("")),
        )
        self._events = max(self._begun, self._events)
        return b"".join(events[self._begun :])

    def delta(self, index: int, text: str, tokens: Sequence[Logprob] = ()) -> bytes:
        """New text."""
        self._texts.append(text)
        number, self._events = self._events, self._events + 1
        return self._before + _encode(text) + self._after % number

    def finish(self, index: int, reason: str, stop: str | None) -> bytes:
        """Text, part and message are complete."""
        self._reason = reason
        text = "".join(self._texts)
        item = self._item(_status(reason), [_part(text)])
        return b"".join(
            (
                self._event("response.output_text.done", **self._place, text=text, logprobs=[]),
                self._event("response.content_part.done", **self._place, part=_part(text)),
                self._event("response.output_item.done", output_index=0, item=item),
            )
        )

    def end(self, usage: Usage) -> bytes:
        """The final event, with the whole response."""
        status = _status(self._reason)
        item = self._item(status, [_part("".join(self._texts))])
        return self._event(f"response.{status}", response=self._response(status, [item], usage))

    def error(self, code: Code, text: str) -> bytes:
        """The event that ends a stream with an error."""
        return error_event(code, text, RESPONSES, self._events)

    def whole(self, choices: Sequence[Choice], usage: Usage) -> bytes:
        """The whole response."""
        (choice,) = choices
        status = _status(choice.finish_reason)
        return _encode(self._response(status, [self._item(status, [_part(choice.text)])], usage))

    def _event(self, kind: str, **fields: Any) -> bytes:
        number, self._events = self._events, self._events + 1
        return b"event: %b\ndata: %b\n\n" % (
            kind.encode(),
            _encode({"type": kind, "sequence_number": number, **fields}),
        )

    def _item(self, status: str, content: list[dict[str, Any]]) -> dict[str, Any]:
        return {"id": self._item_id, "type": "message", "status": status, "role": "assistant", "content": content}

    def _response(self, status: str, output: list[dict[str, Any]], usage: Usage | None) -> dict[str, Any]:
        return {
            "id": self._head.id,
            "object": "response",
            "created_at": self._head.created,
            "status": status,
            "background": False,
            "error": None,
            "incomplete_details": {"reason": "max_output_tokens"} if status == "incomplete" else None,
            "model": self._head.model,
            "output": output,
            "previous_response_id": None,
            "store": False,
            "tools": [],
            "truncation": "disabled",
            "usage": None if usage is None else _usage(usage),
            **self._echo,
        }


def _status(reason: str) -> str:
    return "incomplete" if reason == "length" else "completed"


def _part(text: str) -> dict[str, Any]:
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}


def _usage(usage: Usage) -> dict[str, Any]:
    """OpenAI's object cannot express unknown: if the cache reports nothing, 0 is written."""
    return {
        "input_tokens": usage.prompt,
        "input_tokens_details": {"cached_tokens": usage.cached or 0, "cache_write_tokens": 0},
        "output_tokens": usage.completion,
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": usage.prompt + usage.completion,
    }
