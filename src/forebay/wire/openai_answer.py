"""OpenAI's answers as bytes: whole bodies, stream chunks, embeddings.

A stream chunk costs one JSON string: all that stays the same within a choice is encoded once.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import msgspec

DONE = b"data: [DONE]\n\n"
LOGPROB_MIN = -9999.0
"""What OpenAI says for a probability of zero, whose logarithm JSON cannot carry."""

_encode = msgspec.json.Encoder().encode


class Logprob(Protocol):
    """A token of an answer with its log probability; `engines.protocol.TokenLogprob` is one."""

    @property
    def token(self) -> str:
        """Its text."""

    @property
    def logprob(self) -> float:
        """Natural logarithm of its probability."""

    @property
    def bytes(self) -> tuple[int, ...]:
        """Its UTF-8 bytes."""

    @property
    def top(self) -> tuple[tuple[str, float, tuple[int, ...]], ...]:
        """The likeliest tokens in its place."""


@dataclass(frozen=True, slots=True)
class Head:
    """What all parts of an answer repeat."""

    id: str
    created: int
    model: str
    fingerprint: str


@dataclass(frozen=True, slots=True)
class Usage:
    """Tokens of a request; `cached` None: unknown."""

    prompt: int
    completion: int
    cached: int | None = None

    def document(self) -> dict[str, Any]:
        """OpenAI's `usage` object."""
        usage: dict[str, Any] = {
            "prompt_tokens": self.prompt,
            "completion_tokens": self.completion,
            "total_tokens": self.prompt + self.completion,
        }
        if self.cached is not None:
            usage["prompt_tokens_details"] = {"cached_tokens": self.cached}
        return usage


@dataclass(frozen=True, slots=True)
class Choice:
    """One finished choice; `logprobs` is OpenAI's object for its endpoint, ready to encode."""

    text: str
    finish_reason: str
    logprobs: Mapping[str, Any] | None = None


def chat_logprobs(tokens: Sequence[Logprob]) -> dict[str, Any]:
    """The `logprobs` object of a chat choice."""
    content = [
        {
            "token": t.token,
            "logprob": max(t.logprob, LOGPROB_MIN),
            "bytes": t.bytes,
            "top_logprobs": [
                {"token": token, "logprob": max(logprob, LOGPROB_MIN), "bytes": octets}
                for token, logprob, octets in t.top
            ],
        }
        for t in tokens
    ]
    return {"content": content, "refusal": None}


def completion_logprobs(tokens: Sequence[Logprob], offset: int) -> dict[str, Any]:
    """The `logprobs` object of a completion choice whose first token here begins at character `offset`."""
    offsets = []
    for t in tokens:
        offsets.append(offset)
        offset += len(t.token)
    tops = [{token: max(logprob, LOGPROB_MIN) for token, logprob, _ in t.top} for t in tokens]
    return {
        "tokens": [t.token for t in tokens],
        "token_logprobs": [max(t.logprob, LOGPROB_MIN) for t in tokens],
        "top_logprobs": tops if any(tops) else None,
        "text_offset": offsets,
    }


def chat_body(head: Head, choices: Sequence[Choice], usage: Usage) -> bytes:
    """The whole answer to a chat request."""
    listed: list[dict[str, Any]] = [
        {
            "index": index,
            "message": {"role": "assistant", "content": choice.text, "refusal": None, "annotations": []},
            "logprobs": choice.logprobs,
            "finish_reason": choice.finish_reason,
        }
        for index, choice in enumerate(choices)
    ]
    return _body(head, "chat.completion", listed, usage)


def completion_body(head: Head, choices: Sequence[Choice], usage: Usage) -> bytes:
    """The whole answer to a text completion request."""
    listed = [
        {
            "text": choice.text,
            "index": index,
            "logprobs": choice.logprobs,
            "finish_reason": choice.finish_reason,
        }
        for index, choice in enumerate(choices)
    ]
    return _body(head, "text_completion", listed, usage)


def _body(head: Head, kind: str, choices: list[dict[str, Any]], usage: Usage) -> bytes:
    return _encode(
        {
            "id": head.id,
            "object": kind,
            "created": head.created,
            "model": head.model,
            "system_fingerprint": head.fingerprint,
            "choices": choices,
            "usage": usage.document(),
        }
    )


class Chunks:
    """Builds the server-sent events of one stream."""

    def __init__(self, head: Head, *, chat: bool, choices: int, include_usage: bool) -> None:
        kind = "chat.completion.chunk" if chat else "text_completion"
        shared = _encode(
            {
                "id": head.id,
                "object": kind,
                "created": head.created,
                "model": head.model,
                "system_fingerprint": head.fingerprint,
            }
        )
        self._start = b"data: " + shared[:-1] + b',"choices":['
        self._chat = chat
        self._tail = b'],"usage":null}\n\n' if include_usage else b"]}\n\n"
        before = b'"delta":{"content":' if chat else b'"text":'
        after = b"}" if chat else b""
        self._before = tuple(self._start + b'{"index":%d,' % index + before for index in range(choices))
        self._logprobs = after + b',"logprobs":'
        self._after = after + b',"logprobs":null,"finish_reason":null}' + self._tail

    def opening(self, index: int) -> bytes:
        """The first event of a choice: in a chat it says who speaks, in a completion there is none."""
        if not self._chat:
            return b""
        delta = b'{"index":%d,"delta":{"role":"assistant","content":"","refusal":null},' % index
        return self._start + delta + b'"logprobs":null,"finish_reason":null}' + self._tail

    def delta(self, index: int, text: str, logprobs: Mapping[str, Any] | None = None) -> bytes:
        """New text of a choice."""
        if logprobs is None:
            return self._before[index] + _encode(text) + self._after
        shown = self._logprobs + _encode(logprobs) + b',"finish_reason":null}'
        return self._before[index] + _encode(text) + shown + self._tail

    def finish(self, index: int, reason: str) -> bytes:
        """The last event of a choice."""
        nothing = b'"delta":{}' if self._chat else b'"text":""'
        end = b',"logprobs":null,"finish_reason":%b}' % _encode(reason)
        return self._start + b'{"index":%d,' % index + nothing + end + self._tail

    def usage(self, usage: Usage) -> bytes:
        """The event with the token counts, which has no choices."""
        return self._start + b'],"usage":' + _encode(usage.document()) + b"}\n\n"


def embedding_item(index: int, embedding: bytes) -> bytes:
    """One entry of an embeddings answer; `embedding` is JSON: an array of numbers or a base64 string."""
    return b'{"object":"embedding","index":%d,"embedding":%b}' % (index, embedding)


def embeddings_body(model: str, items: Sequence[bytes], prompt_tokens: int) -> bytes:
    """The whole answer to an embeddings request, from its entries in order."""
    usage = _encode({"prompt_tokens": prompt_tokens, "total_tokens": prompt_tokens})
    end = b'],"model":' + _encode(model) + b',"usage":' + usage + b"}"
    return b'{"object":"list","data":[' + b",".join(items) + end
