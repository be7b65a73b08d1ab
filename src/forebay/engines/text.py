"""Text handling of LLM engines: token bytes to text, stop strings, chat templates."""

import codecs
import json
import time
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any

import jinja2
from jinja2.ext import loopcontrols
from jinja2.sandbox import ImmutableSandboxedEnvironment

from forebay.core.errors import Code, Refusal
from forebay.engines.protocol import Delta, TokenLogprob
from forebay.obs.clock import wall_s

TEMPLATE_CHARS_MAX = 1_000_000
RENDERED_CHARS_MAX = 16_000_000


class AnswerText:
    """Turns the tokens of one answer into text: whole characters only, and never any part of a stop string.

    Text that may be the beginning of a stop string is held back until that is decided. Of several stop strings the
    one completed first wins, so the result does not depend on token boundaries.

    Only whole tokens are released. So wherever an answer breaks off, the text sent so far corresponds to tokens, and
    an engine that tokenizes it again is in the state where the other one stopped.

    `said`, of `said_tokens` tokens, was sent before by another replica: it is not sent again, but a stop string may
    begin in it.
    """

    __slots__ = (
        "_decoder",
        "_ends",
        "_held",
        "_id",
        "_logprobs",
        "_passed",
        "_seam",
        "_stops",
        "_unsent",
        "stop",
        "stopped",
        "tokens",
    )

    def __init__(self, id: str, stops: Sequence[str] = (), said: str = "", said_tokens: int = 0) -> None:
        self._id = id
        self._stops = tuple(stops)
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        longest = max(map(len, self._stops), default=1)
        self._held = said[max(0, len(said) - longest + 1) :]
        self._ends: list[int] = []  # token ends in the held text, except within a character
        self._seam = len(self._held)  # characters of the held text that were sent before
        self._passed = 0  # characters that are no longer held
        self._unsent = 0  # tokens since the last delta
        self._logprobs: list[tuple[int, TokenLogprob]] = []  # with the position in the text where the token begins
        self.tokens = said_tokens
        """Tokens of the whole answer."""
        self.stopped = False
        """A stop string is complete; what follows it is not part of the answer."""
        self.stop: str | None = None
        """The stop string that was found."""

    def push(self, token: bytes, logprob: TokenLogprob | None = None, tokens: int = 1) -> Delta | None:
        """Add a token (or the bytes of several); returns the delta that can be sent now, if any."""
        self.tokens += tokens
        self._unsent += tokens
        if logprob is not None:
            self._logprobs.append((self._passed + len(self._held), logprob))
        text = self._decoder.decode(token)
        whole = not self._decoder.getstate()[0]
        if whole and not self._stops and not self._held:  # the common case
            self._passed += len(text)
            return self._delta(text) if text else None
        self._held += text
        if whole:
            self._ends.append(len(self._held))
        length = self._sure()
        if not self.stopped:
            length = max((end for end in self._ends if end <= length), default=0)
        return self._release(length)

    def end(self) -> Delta | None:
        """No more tokens; returns the rest of the text, with � for a character that was never completed."""
        self._held += self._decoder.decode(b"", final=True)
        length = self._sure()
        if not self.stopped:
            length = len(self._held)
        last = self._release(length)
        if self.stopped or not self._logprobs:
            return last
        rest = tuple(each for _, each in self._logprobs)
        self._logprobs.clear()
        if last is None:
            return Delta(self._id, "", self._unsent, rest)
        return Delta(self._id, last.text, last.tokens, last.logprobs + rest)

    def _sure(self) -> int:
        """How much of the held text cannot be part of a stop string, whatever follows."""
        held = self._held
        seam = self._seam  # a stop string must end after it: sent text cannot be taken back
        found = [
            (at + len(stop), at, stop)
            for stop in self._stops
            if (at := held.find(stop, max(0, seam - len(stop) + 1))) >= 0
        ]
        if found:
            self.stopped = True
            _, at, self.stop = min(found)
            return at
        longest = max(map(len, self._stops), default=0) - 1
        for at in range(max(0, len(held) - longest), len(held)):
            tail = held[at:]
            if any(stop.startswith(tail) for stop in self._stops):
                return at
        return len(held)

    def _release(self, length: int) -> Delta | None:
        text = self._held[self._seam : length]
        self._held = "" if self.stopped else self._held[length:]
        self._seam = max(0, self._seam - length)
        self._ends = [end - length for end in self._ends if end > length]
        self._passed += length
        return self._delta(text) if text else None

    def _delta(self, text: str) -> Delta:
        logprobs: tuple[TokenLogprob, ...] = ()
        if self._logprobs:
            logprobs = tuple(each for at, each in self._logprobs if at < self._passed)
            self._logprobs = [pair for pair in self._logprobs if pair[0] >= self._passed]
        count, self._unsent = self._unsent, 0
        return Delta(self._id, text, count, logprobs)


def token_logprob(token: bytes, logprob: float) -> TokenLogprob:
    """A token in the API's form."""
    return TokenLogprob(token.decode("utf-8", "replace"), logprob, tuple(token))


def render_chat(
    template: str,
    messages: Sequence[Mapping[str, Any]],
    special_tokens: Mapping[str, str],
    param: str = "messages",
) -> str:
    """The prompt of a conversation, up to the assistant's turn. Raises `Refusal` if the template rejects it.

    Templates run in a sandbox, with the functions and settings of transformers. `param` is the name of the messages
    field in the request.
    """
    try:
        compiled = _compile(template)
    except jinja2.TemplateError as error:
        raise Refusal(Code.INTERNAL, f"the chat template of this model is not valid: {error}") from error
    try:
        rendered = compiled.render({**special_tokens, "messages": messages, "add_generation_prompt": True})
    except (jinja2.TemplateError, TypeError, ValueError, KeyError, AttributeError, IndexError) as error:
        text = f"the chat template of this model does not accept these messages: {error}"
        raise Refusal(Code.INVALID_REQUEST, text, param) from error
    except (RecursionError, OverflowError, MemoryError) as error:
        text = "the chat template of this model cannot render messages of this size"
        raise Refusal(Code.INVALID_REQUEST, text, param) from error
    if len(rendered) > RENDERED_CHARS_MAX:
        text = f"the rendered conversation has {len(rendered)} characters; at most {RENDERED_CHARS_MAX} are allowed"
        raise Refusal(Code.CONTEXT_LENGTH_EXCEEDED, text, param)
    return rendered


@lru_cache(maxsize=8)
def _compile(template: str) -> jinja2.Template:
    if len(template) > TEMPLATE_CHARS_MAX:
        raise jinja2.TemplateError(f"longer than {TEMPLATE_CHARS_MAX} characters")
    environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols])
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
    return environment.from_string(template)


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Plain JSON: unlike Jinja's own filter, it does not escape for HTML."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)


def _strftime_now(format: str) -> str:
    return time.strftime(format, time.localtime(wall_s()))
