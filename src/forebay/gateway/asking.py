"""What the gateway reads of a request's body: which model, and what routing wants to know of the prompt.

The body is scanned once and nothing is decoded that is not needed: prompts stay the JSON they are. That two prompts
begin alike shows in their JSON just as well, and a block of it stands for the tokens that its model makes of it.
"""

import math
import re
from typing import Final
from zlib import adler32, crc32

import msgspec

from forebay.core.admission import Band, Ticket
from forebay.core.errors import Code, Refusal
from forebay.core.model import ModelRoutes, Task
from forebay.core.routing import BATCH, INTERACTIVE, Ask
from forebay.core.routing.speed import Lengths
from forebay.core.tenancy import Tenant
from forebay.net.server import Exchange

BLOCK_BYTES: Final = 512
BLOCKS_MAX: Final = 512
"""Blocks of a longer prompt are not told apart any more."""
DIGITS_MAX: Final = 9
SESSION: Final = b"x-forebay-session"
"""Header whose value keeps requests together, where a model is routed by `consistent_hash`."""
PRIORITY: Final = b"x-forebay-priority"
DEADLINE: Final = b"x-forebay-deadline-ms"
BANDS: Final = {band.name.lower().encode(): band for band in Band}
BATCH_PATIENCE: Final = 5
"""Batch work waits this many times as long: it is reached by age after two minutes."""
FIELD: Final = re.compile(r"(?:required field `|at `\$\.)([^`]*)`")
NOTHING: Final = msgspec.Raw(b"")


class Wanted(msgspec.Struct, gc=False):
    """The fields that routing needs; the replica checks all the others, and these again."""

    model: str
    stream: bool | None = None
    messages: msgspec.Raw = NOTHING
    prompt: msgspec.Raw = NOTHING
    input: msgspec.Raw = NOTHING
    max_tokens: msgspec.Raw = NOTHING
    max_completion_tokens: msgspec.Raw = NOTHING

    @property
    def text(self) -> memoryview:
        """The JSON of what the model is to read."""
        return memoryview(self.messages or self.prompt or self.input)


_decode = msgspec.json.Decoder(Wanted).decode


def wanted(body: bytes) -> Wanted:
    """Read a body. Raises `Refusal`."""
    try:
        return _decode(body)
    except msgspec.ValidationError as error:
        field = FIELD.search(str(error))
        raise Refusal(Code.INVALID_REQUEST, f"{error}.", field[1] if field else None) from None
    except msgspec.DecodeError as error:
        raise Refusal(Code.INVALID_JSON, f"The body is not valid JSON: {error}.") from None
    except UnicodeDecodeError:
        raise Refusal(Code.INVALID_JSON, "The body is not valid UTF-8.") from None


def expected_tokens(request: Wanted, lengths: Lengths) -> float:
    """What prompt and answer may come to."""
    limit = _number(request.max_completion_tokens or request.max_tokens)
    return lengths.tokens(max(1, len(request.text))) + min(limit or math.inf, lengths.output_tokens)


def make_ticket(
    exchange: Exchange, tenant: Tenant, *, work_tokens: float, began: float, queue_timeout_s: float
) -> Ticket:
    """What a request may claim. Raises `Refusal` for a priority or a deadline that makes no sense."""
    asked = exchange.header(PRIORITY)
    if asked is not None and asked not in BANDS:
        allowed = ", ".join(name.decode() for name in BANDS)
        raise Refusal(Code.INVALID_REQUEST, f"'{PRIORITY.decode()}': allowed are {allowed}.", PRIORITY.decode())
    band = tenant.band_of(BANDS[asked] if asked is not None else None)
    patience_s = queue_timeout_s * (BATCH_PATIENCE if band is Band.BATCH else 1)
    given = exchange.header(DEADLINE)
    if given is not None:
        if not given.isdigit() or not 0 < len(given) <= DIGITS_MAX:
            text = f"'{DEADLINE.decode()}': a whole number of milliseconds is wanted."
            raise Refusal(Code.INVALID_REQUEST, text, DEADLINE.decode())
        patience_s = min(patience_s, int(given) / 1000)
    return Ticket(band, tenant.name, work_tokens, began + patience_s)


def make_ask(
    request: Wanted, exchange: Exchange, request_id: bytes, *, routes: ModelRoutes, lengths: Lengths, band: Band
) -> Ask:
    """What routing knows of the request. Lengths are estimates: the tokenizer is the engine's."""
    prompt = request.text
    session = exchange.header(SESSION)
    chat = routes.task is Task.CHAT
    limit = _number(request.max_completion_tokens or request.max_tokens)
    return Ask(
        seed=crc32(request_id),
        tokens=lengths.tokens(max(1, len(prompt))),
        output_tokens=min(lengths.output_tokens, limit or lengths.output_tokens) if chat else 0.0,
        blocks=blocks(prompt, request.model) if chat else (),
        block_tokens=lengths.tokens(BLOCK_BYTES),
        key=1 + crc32(session) if session else 0,
        weights=BATCH if band is Band.BATCH else INTERACTIVE,
        ttft_budget_s=routes.ttft_budget_s,
    )


def blocks(prompt: memoryview, model: str) -> tuple[int, ...]:
    """Chained hashes of the whole blocks of a prompt, alike in every gateway. A collision costs a cache miss."""
    crc, adler = crc32(model.encode()), 1
    found = []
    for at in range(0, min(len(prompt), BLOCKS_MAX * BLOCK_BYTES) - BLOCK_BYTES + 1, BLOCK_BYTES):
        block = prompt[at : at + BLOCK_BYTES]
        crc, adler = crc32(block, crc), adler32(block, adler)
        found.append(adler << 32 | crc)
    return tuple(found)


def _number(text: msgspec.Raw) -> int:
    """A positive number of sensible size; 0 for everything else, which the replica refuses."""
    digits = bytes(text)
    return int(digits) if digits.isdigit() and len(digits) <= DIGITS_MAX else 0
