"""A chat or text completion under way: events of its sequences become one answer or one stream."""

from collections.abc import Sequence
from dataclasses import dataclass

from forebay.core.errors import Refusal
from forebay.engines.protocol import Delta, Embedded, Event, Failed, Finished, Generate, TokenLogprob
from forebay.wire.openai_answer import (
    DONE,
    Choice,
    Chunks,
    Head,
    Usage,
    chat_body,
    chat_logprobs,
    completion_body,
    completion_logprobs,
)
from forebay.worker.call import Call, failed
from forebay.worker.engine_process import EngineProcess

CHAT_NAMES = {"prompt": "messages", "schema": "response_format"}
COMPLETION_NAMES = {"schema": "response_format", "top_logprobs": "logprobs"}


@dataclass(frozen=True, slots=True)
class Plan:
    """What the answer looks like. `prefixes` are texts that choices begin with (`echo`), by index; else empty.

    `begun`: the text of the only choice of a stream that another replica has begun; None for a new answer.
    """

    chat: bool
    head: Head
    n: int
    stream: bool
    include_usage: bool
    logprobs: bool
    prefixes: tuple[str, ...] = ()
    begun: str | None = None


class _Choice:
    """What has come of one sequence."""

    __slots__ = (
        "first_at",
        "index",
        "last_at",
        "logprobs",
        "offset",
        "opened",
        "prefix",
        "reason",
        "texts",
        "tokens",
    )

    def __init__(self, index: int, prefix: str) -> None:
        self.index = index
        self.prefix = prefix
        self.offset = len(prefix)
        self.texts: list[str] = []
        self.logprobs: list[TokenLogprob] = []
        self.reason = ""
        self.opened = False
        self.tokens = 0
        self.first_at = self.last_at = 0.0


class Generation:
    """Fans a request out to sequences and gathers them again. The listener of its work."""

    def __init__(self, call: Call, engine: EngineProcess, plan: Plan, works: Sequence[Generate]) -> None:
        self._call = call
        self._engine = engine
        self._plan = plan
        self._works = works
        prefixes = plan.prefixes or ("",) * len(works)
        self._choices = {work.id: _Choice(i, prefixes[i]) for i, work in enumerate(works)}
        self._open = len(works)
        self._started = False
        self._prompt_tokens = 0
        self._completion_tokens = 0
        self._cached_tokens: int | None = None
        self._out: list[bytes] = []
        self._chunks: Chunks | None = None
        if plan.begun is not None:
            self._go_on(plan.begun)
        if plan.stream:
            self._chunks = Chunks(plan.head, chat=plan.chat, choices=len(works), include_usage=plan.include_usage)

    def start(self) -> None:
        """Hand the work to the engine. Raises `Refusal`."""
        self._engine.submit(self._works, self)
        self._call.exchange.on_disconnect = self._gone

    def on_events(self, events: Sequence[Event], now: float) -> None:
        """Take news in, and send what can be sent."""
        for event in events:
            choice = self._choices[event.id]
            match event:
                case Delta():
                    self._delta(choice, event, now)
                case Finished():
                    self._finished(choice, event)
                case Failed(_, code, text, param):
                    names = CHAT_NAMES if self._plan.chat else COMPLETION_NAMES
                    self._engine.cancel(self._choices)
                    self._call.fail(failed(code, text, param, names))
                    return
                case Embedded():
                    raise AssertionError("a vector in answer to a prompt")
        if not self._started:
            self._started = True
            self._call.first_token(now)
        if self._chunks is not None:
            self._send(self._chunks)
        elif not self._open:
            self._answer()

    def _go_on(self, begun: str) -> None:
        """The client has the beginning of the only choice: who speaks in a chat, and text, if there was any."""
        (choice,) = self._choices.values()
        choice.opened = self._plan.chat or bool(begun)
        choice.offset = len(begun)

    def on_lost(self, refusal: Refusal) -> None:
        """The engine is gone."""
        self._call.fail(refusal)

    def _gone(self) -> None:
        self._engine.cancel(self._choices)
        self._call.gone()

    def _delta(self, choice: _Choice, delta: Delta, now: float) -> None:
        if not choice.tokens:
            choice.first_at = now
        choice.last_at = now
        choice.tokens += delta.tokens
        chunks = self._chunks
        if chunks is None:
            choice.texts.append(delta.text)
            choice.logprobs += delta.logprobs
            return
        if not choice.opened:
            self._begin(chunks, choice)
        if not delta.logprobs:
            if delta.text:
                self._out.append(chunks.delta(choice.index, delta.text))
            return
        if self._plan.chat:
            logprobs = chat_logprobs(delta.logprobs)
        else:
            logprobs = completion_logprobs(delta.logprobs, choice.offset)
            choice.offset += sum(len(each.token) for each in delta.logprobs)
        self._out.append(chunks.delta(choice.index, delta.text, logprobs))

    def _begin(self, chunks: Chunks, choice: _Choice) -> None:
        choice.opened = True
        self._out.append(chunks.opening(choice.index))
        if choice.prefix:
            self._out.append(chunks.delta(choice.index, choice.prefix))

    def _finished(self, choice: _Choice, event: Finished) -> None:
        choice.reason = event.reason
        self._open -= 1
        self._completion_tokens += event.completion_tokens
        if choice.index % self._plan.n == 0:  # the choices of a prompt share it: count it once
            self._prompt_tokens += event.prompt_tokens
            if event.cached_tokens is not None:
                self._cached_tokens = (self._cached_tokens or 0) + event.cached_tokens
        if choice.tokens > 1:
            self._call.pace((choice.last_at - choice.first_at) / (choice.tokens - 1))
        if self._chunks is not None:
            if not choice.opened:
                self._begin(self._chunks, choice)
            self._out.append(self._chunks.finish(choice.index, event.reason))

    def _usage(self) -> Usage:
        return Usage(self._prompt_tokens, self._completion_tokens, self._cached_tokens)

    def _send(self, chunks: Chunks) -> None:
        out, self._out = self._out, []
        if not self._open:
            if self._plan.include_usage:
                out.append(chunks.usage(self._usage()))
            out.append(DONE)
        self._call.write(b"".join(out))
        if not self._open:
            self._call.finish(self._usage())

    def _answer(self) -> None:
        chat = self._plan.chat
        choices = []
        for choice in self._choices.values():
            logprobs = None
            if self._plan.logprobs:
                tokens = choice.logprobs
                logprobs = chat_logprobs(tokens) if chat else completion_logprobs(tokens, choice.offset)
            choices.append(Choice(choice.prefix + "".join(choice.texts), choice.reason, logprobs))
        usage = self._usage()
        self._call.answer((chat_body if chat else completion_body)(self._plan.head, choices, usage), usage)
