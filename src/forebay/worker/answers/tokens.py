"""A request for the tokens of a text, for their number, or for the text of tokens, under way."""

from collections.abc import Sequence

from forebay.core.errors import Refusal
from forebay.engines.protocol import Detokenize, Detokenized, Event, Failed, Tokenize, Tokenized
from forebay.wire.apis.messages_answer import count_body
from forebay.wire.apis.tokens import detokenize_body, tokenize_body
from forebay.worker.call import Call, failed
from forebay.worker.engine_process import EngineProcess


class Translation:
    """Asks the engine, whose tokenizer it is. Listener of its work; `param` is how the request calls its input.

    `counting`: Anthropic's client wants to know how many tokens there are, and no more.
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
        """Hand the work to the engine. Raises `Refusal`."""
        self._engine.submit((self._work,), self)
        self._call.exchange.on_disconnect = self._gone

    def on_events(self, events: Sequence[Event], now: float) -> None:
        """Take the answer in and send it on."""
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
        """The engine is gone."""
        self._call.fail(refusal)

    def _gone(self) -> None:
        self._engine.cancel((self._work.id,))
        self._call.gone()
