"""OpenAI's responses as bytes: chat completions and text completions, whole or as stream chunks, and embeddings.

A stream chunk costs encoding one JSON string: everything constant within a choice is encoded once.
"""

from abc import ABC, abstractmethod
from codecs import IncrementalDecoder, getincrementaldecoder
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Protocol

import msgspec

from forebay.core.errors import Code
from forebay.wire.errors import error_event

DONE = b"data: [DONE]\n\n"
LOGPROB_MIN = -9999.0
"""What OpenAI returns for a probability of zero, whose logarithm JSON cannot represent."""

_encode = msgspec.json.Encoder().encode


class Logprob(Protocol):
    """A generated token with its log probability; `engines.protocol.TokenLogprob` is one."""

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
        """The most likely tokens at its position."""


@dataclass(frozen=True, slots=True)
class Head:
    """The fields that all parts of a response repeat."""

    id: str
    created: int
    model: str
    fingerprint: str


@dataclass(frozen=True, slots=True)
class Usage:
    """Token counts of a request; `cached` None: unknown."""

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


NOTHING_USED = Usage(0, 0)


@dataclass(frozen=True, slots=True)
class Choice:
    """One finished choice. `logprobs` None: not requested. `stop`: the stop string that ended it, if one did."""

    text: str
    finish_reason: str
    logprobs: Sequence[Logprob] | None = None
    stop: str | None = None


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


class Offsets:
    """Where the tokens of a choice begin in its text, in characters; one within a character begins where that does.

    `begin`: the length of the text before the first token.
    """

    def __init__(self, begin: int) -> None:
        self._at = begin
        self._decoder: IncrementalDecoder = getincrementaldecoder("utf-8")("replace")

    def of(self, token: Logprob) -> int:
        """The offset of the next token."""
        at = self._at
        self._at += len(self._decoder.decode(bytes(token.bytes)))
        return at


def completion_logprobs(tokens: Sequence[Logprob], offsets: Offsets) -> dict[str, Any]:
    """The `logprobs` object of a completion choice, for its next tokens."""
    tops = [{token: max(logprob, LOGPROB_MIN) for token, logprob, _ in t.top} for t in tokens]
    return {
        "tokens": [t.token for t in tokens],
        "token_logprobs": [max(t.logprob, LOGPROB_MIN) for t in tokens],
        "top_logprobs": tops if any(tops) else None,
        "text_offset": [offsets.of(t) for t in tokens],
    }


class _Chunks(ABC):
    """The chunks of a stream, and what they have in common with a whole response.

    `begun`: the text of the only choice of a stream that another replica has begun; None for a new response.
    """

    names: ClassVar[Mapping[str, str]]
    """The request's names of engine parameters, where they differ."""
    _kind: ClassVar[str]
    _chunk_kind: ClassVar[str]
    _around: ClassVar[tuple[bytes, bytes, bytes]]
    """The JSON before and after the text of a choice, and instead of the three in its last event."""

    def __init__(
        self,
        head: Head,
        choices: int = 1,
        *,
        stream: bool = False,
        include_usage: bool = False,
        begun: str | None = None,
    ) -> None:
        self._head = head
        self._begun = begun
        self._include_usage = include_usage
        if not stream:
            return
        self._start = b"data: " + _encode(self._shared(self._chunk_kind))[:-1] + b',"choices":['
        self._tail = b'],"usage":null}\n\n' if include_usage else b"]}\n\n"
        before, after, _ = self._around
        self._before = tuple(self._start + b'{"index":%d,' % index + before for index in range(choices))
        self._with_logprobs = after + b',"logprobs":'
        self._after = after + b',"logprobs":null,"finish_reason":null}' + self._tail

    def delta(self, index: int, text: str, tokens: Sequence[Logprob] = ()) -> bytes:
        """New text of a choice, with the log probabilities of its tokens if requested."""
        if not tokens:
            return self._before[index] + _encode(text) + self._after
        shown = self._with_logprobs + _encode(self._logprobs(index, tokens)) + b',"finish_reason":null}'
        return self._before[index] + _encode(text) + shown + self._tail

    def finish(self, index: int, reason: str, stop: str | None = None) -> bytes:
        """The last event of a choice."""
        end = b',"logprobs":null,"finish_reason":%b}' % _encode(reason)
        return self._start + b'{"index":%d,' % index + self._around[2] + end + self._tail

    def end(self, usage: Usage) -> bytes:
        """The end of a stream; preceded, if requested, by the event with the token counts, which has no choices."""
        if not self._include_usage:
            return DONE
        return self._start + b'],"usage":' + _encode(usage.document()) + b"}\n\n" + DONE

    def error(self, code: Code, text: str) -> bytes:
        """The event that ends a stream with an error."""
        return error_event(code, text)

    @abstractmethod
    def _logprobs(self, index: int, tokens: Sequence[Logprob]) -> dict[str, Any]:
        """OpenAI's `logprobs` object for these tokens of a choice."""

    def _shared(self, kind: str) -> dict[str, Any]:
        head = self._head
        return {
            "id": head.id,
            "object": kind,
            "created": head.created,
            "model": head.model,
            "system_fingerprint": head.fingerprint,
        }

    def _body(self, choices: list[dict[str, Any]], usage: Usage) -> bytes:
        return _encode(self._shared(self._kind) | {"choices": choices, "usage": usage.document()})


class ChatAnswer(_Chunks):
    """Writes the response of `/v1/chat/completions`."""

    names: ClassVar[Mapping[str, str]] = {"prompt": "messages", "schema": "response_format"}
    _kind, _chunk_kind = "chat.completion", "chat.completion.chunk"
    _around = (b'"delta":{"content":', b"}", b'"delta":{}')

    def opening(self, index: int, usage: Usage = NOTHING_USED) -> bytes:
        """The first event of a choice, with the role."""
        if self._begun is not None:
            return b""
        delta = b'{"index":%d,"delta":{"role":"assistant","content":"","refusal":null},' % index
        return self._start + delta + b'"logprobs":null,"finish_reason":null}' + self._tail

    def whole(self, choices: Sequence[Choice], usage: Usage) -> bytes:
        """The whole response."""
        listed: list[dict[str, Any]] = [
            {
                "index": index,
                "message": {"role": "assistant", "content": choice.text, "refusal": None, "annotations": []},
                "logprobs": None if choice.logprobs is None else chat_logprobs(choice.logprobs),
                "finish_reason": choice.finish_reason,
            }
            for index, choice in enumerate(choices)
        ]
        return self._body(listed, usage)

    def _logprobs(self, index: int, tokens: Sequence[Logprob]) -> dict[str, Any]:
        return chat_logprobs(tokens)


class CompletionAnswer(_Chunks):
    """Writes the response of `/v1/completions`. `prefixes`: texts that the choices begin with (`echo`), by index; or
    empty."""

    names: ClassVar[Mapping[str, str]] = {"schema": "response_format", "top_logprobs": "logprobs"}
    _kind = _chunk_kind = "text_completion"
    _around = (b'"text":', b"", b'"text":""')

    def __init__(
        self,
        head: Head,
        choices: int = 1,
        *,
        stream: bool = False,
        include_usage: bool = False,
        prefixes: Sequence[str] = (),
        begun: str | None = None,
    ) -> None:
        super().__init__(head, choices, stream=stream, include_usage=include_usage, begun=begun)
        self._prefixes = prefixes or ("",) * choices
        self._offsets = [Offsets(len(begun or prefix)) for prefix in self._prefixes]

    def opening(self, index: int, usage: Usage = NOTHING_USED) -> bytes:
        """The first event of a choice: the echoed prompt, unless the client has it already."""
        prefix = self._prefixes[index]
        return b"" if self._begun or not prefix else self.delta(index, prefix)

    def whole(self, choices: Sequence[Choice], usage: Usage) -> bytes:
        """The whole response."""
        listed = [
            {
                "text": self._prefixes[index] + choice.text,
                "index": index,
                "logprobs": None if choice.logprobs is None else self._logprobs(index, choice.logprobs),
                "finish_reason": choice.finish_reason,
            }
            for index, choice in enumerate(choices)
        ]
        return self._body(listed, usage)

    def _logprobs(self, index: int, tokens: Sequence[Logprob]) -> dict[str, Any]:
        return completion_logprobs(tokens, self._offsets[index])


def embedding_item(index: int, embedding: bytes) -> bytes:
    """One entry of an embeddings response; `embedding` is JSON: an array of numbers or a base64 string."""
    return b'{"object":"embedding","index":%d,"embedding":%b}' % (index, embedding)


def embeddings_body(model: str, items: Sequence[bytes], prompt_tokens: int) -> bytes:
    """The whole embeddings response, from its entries in order."""
    usage = _encode({"prompt_tokens": prompt_tokens, "total_tokens": prompt_tokens})
    end = b'],"model":' + _encode(model) + b',"usage":' + usage + b"}"
    return b'{"object":"list","data":[' + b",".join(items) + end
