"""A text request in flight: events of its sequences become one response or one stream, in its endpoint's format."""

from collections.abc import Mapping, Sequence
from typing import Protocol

from forebay.core.errors import Code, Refusal
from forebay.engines.protocol import Begun, Delta, Event, Failed, Finished, Generate, TokenLogprob
from forebay.engines.sampling import resumable
from forebay.wire.openai_answer import Choice, Usage
from forebay.worker.call import Call, failed
from forebay.worker.engine_process import EngineProcess


class ResponseWriter(Protocol):
    """Writes responses in an endpoint's format: whole, or as the events of a stream. One object per response."""

    @property
    def names(self) -> Mapping[str, str]:
        """The request's names of engine parameters, where they differ."""

    def opening(self, index: int, usage: Usage) -> bytes:
        """The events before the first text of a choice; `usage`: the counts known by then."""

    def delta(self, index: int, text: str, tokens: Sequence[TokenLogprob] = (), /) -> bytes:
        """New text of a choice, with the log probabilities of its tokens if requested."""

    def finish(self, index: int, reason: str, stop: str | None) -> bytes:
        """The end of a choice; `stop` is the stop string that ended it, if one did."""

    def end(self, usage: Usage) -> bytes:
        """The end of a stream, after that of every choice."""

    def error(self, code: Code, text: str) -> bytes:
        """The end of a stream that cannot be completed."""

    def whole(self, choices: Sequence[Choice], usage: Usage) -> bytes:
        """A whole response."""


class _Choice:
    """The output of one sequence so far."""

    __slots__ = (
        "cached_tokens", "first_at", "index", "last_at", "logprobs", "opened", "prompt_tokens", "reason", "stop",
        "texts", "tokens",
    )  # fmt: skip

    def __init__(self, index: int) -> None:
        self.index = index
        self.texts: list[str] = []
        self.logprobs: list[TokenLogprob] = []
        self.reason = ""
        self.stop: str | None = None
        self.opened = False
        self.tokens = 0
        self.prompt_tokens: int | None = None
        self.cached_tokens: int | None = None
        self.first_at = self.last_at = 0.0


class Generation:
    """Submits a request as sequences, `n` for each prompt, and collects their output. The listener of its work."""

    def __init__(
        self,
        call: Call,
        engine: EngineProcess,
        writer: ResponseWriter,
        works: Sequence[Generate],
        *,
        stream: bool,
        n: int = 1,
        logprobs: bool = False,
        names: Mapping[str, str] | None = None,
    ) -> None:
        """`names`: instead of the writer's."""
        self._call = call
        self._engine = engine
        self._writer = writer
        self._works = works
        self._stream = stream
        self._n = n
        self._logprobs = logprobs
        self._names = writer.names if names is None else names
        self._choices = {work.id: _Choice(i) for i, work in enumerate(works)}
        self._open = len(works)
        self._started = False
        self._unread = len(works) // n
        """Prompts whose length the engine has not reported yet."""
        self._prompt_tokens = 0
        self._completion_tokens = 0
        self._cached_tokens: int | None = None
        self._out: list[bytes] = []

    def start(self) -> None:
        """Submit the work to the engine. Raises `Refusal`."""
        self._engine.submit(self._works, self)
        self._call.exchange.on_disconnect = self._gone

    def on_events(self, events: Sequence[Event], now: float) -> None:
        """Process events, and send what can be sent."""
        begun = 0
        for event in events:
            choice = self._choices[event.id]
            if type(event) is Delta:  # nearly always; class patterns touch several times as much memory
                self._delta(choice, event, now)
                continue
            match event:
                case Begun():
                    self._prompt_read(choice, event)
                    begun += 1
                case Finished():
                    self._finished(choice, event)
                case Failed(_, code, text, param):
                    self._engine.cancel(self._choices)
                    self.on_lost(failed(code, text, param, self._names_for(choice)))
                    return
                case _:
                    raise AssertionError("neither text nor its end in answer to a prompt")
        if begun == len(events):  # their first text is still being held back
            return
        if not self._started:
            self._started = True
            self._call.first_token(now)
            if self._stream:
                self._call.begin(None if self._unread else self._usage(), resumable=self._resumable())
        if self._stream:
            self._send()
        elif not self._open:
            self._answer()

    def on_lost(self, refusal: Refusal) -> None:
        """The response cannot be completed."""
        self._call.fail(refusal, self._writer.error)

    def _gone(self) -> None:
        self._engine.cancel(self._choices)
        self._call.gone()

    def _delta(self, choice: _Choice, delta: Delta, now: float) -> None:
        if not choice.tokens:
            choice.first_at = now
        choice.last_at = now
        choice.tokens += delta.tokens
        if not self._stream:
            choice.texts.append(delta.text)
            choice.logprobs += delta.logprobs
            return
        if not choice.opened:
            self._begin(choice)
        if delta.logprobs:
            self._out.append(self._writer.delta(choice.index, delta.text, delta.logprobs))
        elif delta.text:
            self._out.append(self._writer.delta(choice.index, delta.text))

    def _prompt_read(self, choice: _Choice, event: Begun | Finished) -> None:
        """Count a prompt as soon as its length is reported, once: its choices share it."""
        if choice.index % self._n:
            return
        prompt, cached = 0, 0
        if choice.prompt_tokens is None:
            choice.prompt_tokens = prompt = event.prompt_tokens
            self._unread -= 1
            self._prompt_tokens += prompt
        if choice.cached_tokens is None and event.cached_tokens is not None:
            choice.cached_tokens = cached = event.cached_tokens
            self._cached_tokens = (self._cached_tokens or 0) + cached
        self._call.prompt_read(prompt, cached)

    def _begin(self, choice: _Choice) -> None:
        choice.opened = True
        self._out.append(self._writer.opening(choice.index, self._usage()))

    def _finished(self, choice: _Choice, event: Finished) -> None:
        choice.reason, choice.stop = event.reason, event.stop
        self._open -= 1
        self._completion_tokens += event.completion_tokens
        self._prompt_read(choice, event)
        if choice.tokens > 1:
            self._call.pace((choice.last_at - choice.first_at) / (choice.tokens - 1))
        if self._stream:
            if not choice.opened:
                self._begin(choice)
            self._out.append(self._writer.finish(choice.index, event.reason, event.stop))

    def _names_for(self, choice: _Choice) -> Mapping[str, str]:
        """The request's names of engine parameters; of several prompts, that of this choice."""
        if len(self._works) == self._n:
            return self._names
        return {**self._names, "prompt": f"prompt[{choice.index // self._n}]"}

    def _resumable(self) -> bool:
        info = self._engine.info
        counts_said = info is not None and info.counts_said
        return len(self._works) == 1 and resumable(self._works[0].sampling, counts_said=counts_said)

    def _usage(self) -> Usage:
        return Usage(self._prompt_tokens, self._completion_tokens, self._cached_tokens)

    def _send(self) -> None:
        out, self._out = self._out, []
        if not self._open:
            out.append(self._writer.end(self._usage()))
        self._call.write(b"".join(out))
        if not self._open:
            self._call.finish(self._usage())

    def _answer(self) -> None:
        choices = [
            Choice("".join(each.texts), each.reason, each.logprobs if self._logprobs else None, each.stop)
            for each in self._choices.values()
        ]
        usage = self._usage()
        self._call.answer(self._writer.whole(choices, usage), usage)
