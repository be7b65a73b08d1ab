"""Traces in Mooncake's format (FAST'25, `kvcache-ai/Mooncake`, FAST25-release/traces): one JSON object a line.

`timestamp` in ms, `input_length`, `output_length`, and `hash_ids`: chained ids of the prompt's blocks of 512 tokens.
"""

from array import array
from collections.abc import Iterable, Sequence
from itertools import pairwise
from statistics import median_low
from typing import Annotated, Final, NamedTuple

import msgspec

from forebay.sim.load.columns import Columns
from forebay.sim.load.traces.lines import SPAN_S_MAX, TOKENS_MAX, BadLine
from forebay.wire.documents import UNREADABLE

BLOCK_TOKENS: Final = 512
STAMPS_MIN: Final = 10
"""Fewer distinct times are not enough to detect a coarse clock."""
TICK_ERROR: Final = 0.01
"""Tolerance of a tick, relative to its length: those of the conversation trace are 2,997 to 3,003 ms long."""

Tokens = Annotated[int, msgspec.Meta(ge=0, le=TOKENS_MAX)]
BlockId = Annotated[int, msgspec.Meta(ge=0, le=2**63 - 1)]


class _Line(msgspec.Struct, gc=False):
    timestamp: Annotated[float, msgspec.Meta(ge=0, le=SPAN_S_MAX * 1000)]
    input_length: Tokens
    output_length: Tokens
    hash_ids: tuple[BlockId, ...] = ()


_line = msgspec.json.Decoder(_Line).decode


class Mooncake(NamedTuple):
    """A trace as written. `quantum_s`: tick of a coarse clock, on which requests share times; 0: none."""

    columns: Columns
    quantum_s: float


def mooncake(lines: Iterable[bytes]) -> Mooncake:
    """Read a trace. Raises `BadLine`."""
    stamps, prompts, outputs = array("d"), array("i"), array("i")
    blocks: list[tuple[int, ...]] = []
    for line in lines:
        try:
            row = _line(line)
        except UNREADABLE as error:
            raise BadLine(f"invalid line of Mooncake's format: {error}") from error
        prompt, ids = row.input_length, row.hash_ids
        if len(ids) > -(-prompt // BLOCK_TOKENS):
            raise BadLine(f"{len(ids)} blocks of {BLOCK_TOKENS} tokens are more than a prompt of {prompt} tokens has")
        stamps.append(row.timestamp)
        prompts.append(prompt or 1)
        outputs.append(row.output_length or 1)
        blocks.append(ids)
    at_s = array("d", (stamp / 1000 for stamp in stamps))
    requests = Columns(at_s, prompts, outputs, blocks=blocks if any(blocks) else ()).in_order().from_zero()
    return Mooncake(requests, quantum_ms(stamps) / 1000)


def quantum_ms(stamps_ms: Sequence[float]) -> float:
    """The tick of a coarse clock, if there clearly is one: requests share times, and all gaps between distinct times
    are about multiples of it, more than a millisecond. Else 0."""
    distinct = sorted(set(stamps_ms))
    if not STAMPS_MIN <= len(distinct) < len(stamps_ms):
        return 0.0
    gaps = [after - before for before, after in pairwise(distinct)]
    tick = median_low(gaps)
    even = all(abs(gap - max(1, round(gap / tick)) * tick) <= TICK_ERROR * tick for gap in gaps)
    return tick if even and tick > 1 else 0.0
