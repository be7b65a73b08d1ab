"""A tokenize, token count or detokenize request in flight."""

from collections.abc import Sequence

from forebay.core.errors import Refusal
from forebay.engines.protocol import Detokenize, Detokenized, Event, Failed, Tokenize, Tokenized
from forebay.wire.apis.messages_answer import count_body
from forebay.wire.apis.tokens import detokenize_body, tokenize_body
from forebay.worker.call import Call, failed
from forebay.worker.engine_process import EngineProcess


class TokenizerCall:
    """Has the engine, which owns the tokenizer, convert. The listener of its work; `param` is the request's name of
    its input.

    `counting`: only the number of tokens is returned, for Anthropic's API.
    """

    def __init__(
        self,
        call: Call,
        engine: EngineProcess,
        work: Tokenize | Detokenize,
        param: str,
        context_tokens: int,
        *,
        counting: bool = False,
    ) -> None:
        self._call = call
        self._engine = engine
        self._work = work
        self._param = param
        self._context_tokens = context_tokens
        self._counting = counting

    def start(self) -> None:
        """Submit the work to the engine. Raises `Refusal`."""
        self._engine.submit((self._work,), self)
        self._call.exchange.on_disconnect = self._gone

    def on_events(self, events: Sequence[Event], now: float) -> None:
        """Send the engine's result."""
        (event,) = events
        match event:
            case Tokenized(_, tokens):
                body = count_body(len(tokens)) if self._counting else tokenize_body(tokens, self._context_tokens)
                self._call.answer(body, None)
            case Detokenized(_, text):
                self._call.answer(detokenize_body(text), None)
            case Failed(_, code, text, param):
                names = dict.fromkeys(("prompt", "input"), self._param)
                self._call.fail(failed(code, text, param, names))
            case _:
                raise AssertionError("neither tokens nor text in answer to the other")

    def on_lost(self, refusal: Refusal) -> None:
        """The engine has failed."""
        self._call.fail(refusal)

    def _gone(self) -> None:
        self._engine.cancel((self._work.id,))
        self._call.gone()
