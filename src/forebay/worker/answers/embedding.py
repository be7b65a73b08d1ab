"""An embeddings request in flight: collects vectors, in whatever order they arrive, into one response."""

from base64 import b64encode
from collections.abc import Sequence

import msgspec

from forebay.core.errors import Refusal
from forebay.engines.protocol import Embed, Embedded, Event, Failed
from forebay.wire.openai_answer import Usage, embedding_item, embeddings_body
from forebay.worker.call import Call, failed
from forebay.worker.engine_process import EngineProcess

_encode = msgspec.json.Encoder().encode


class Embedding:
    """Submits the inputs of a request as separate work and collects the vectors. The listener of its work."""

    def __init__(self, call: Call, engine: EngineProcess, model: str, base64: bool, works: Sequence[Embed]) -> None:
        self._call = call
        self._engine = engine
        self._model = model
        self._base64 = base64
        self._works = works
        self._places = {work.id: i for i, work in enumerate(works)}
        self._items = [b""] * len(works)
        self._open = len(works)
        self._prompt_tokens = 0

    def start(self) -> None:
        """Submit the work to the engine. Raises `Refusal`."""
        self._engine.submit(self._works, self)
        self._call.exchange.on_disconnect = self._gone

    def on_events(self, events: Sequence[Event], now: float) -> None:
        """Collect vectors; respond when all have arrived."""
        for event in events:
            match event:
                case Embedded(id, vector, prompt_tokens):
                    place = self._places[id]
                    self._items[place] = embedding_item(place, self._json(vector))
                    self._prompt_tokens += prompt_tokens
                    self._call.prompt_read(prompt_tokens, 0)
                    self._open -= 1
                case Failed(id, code, text, param):
                    self._engine.cancel(self._places)
                    where = "input" if len(self._works) == 1 else f"input[{self._places[id]}]"
                    self._call.fail(failed(code, text, param, {"input": where, "prompt": where}))
                    return
                case _:
                    raise AssertionError("text in answer to an input")
        if not self._open:
            body = embeddings_body(self._model, self._items, self._prompt_tokens)
            self._call.answer(body, Usage(self._prompt_tokens, 0))

    def on_lost(self, refusal: Refusal) -> None:
        """The engine has failed."""
        self._call.fail(refusal)

    def _gone(self) -> None:
        self._engine.cancel(self._places)
        self._call.gone()

    def _json(self, vector: bytes) -> bytes:
        if self._base64:
            return b'"' + b64encode(vector) + b'"'
        return _encode(memoryview(vector).cast("f").tolist())
