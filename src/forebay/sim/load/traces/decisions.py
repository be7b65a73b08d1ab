"""Decision records of our own gateways as a workload.

A record has a request's arrival (its end minus its duration), its tenant and its tokens, but neither text nor blocks
of its prompt: in a replay no prompts share a prefix, so caches hit only what a policy guesses. The number of cached
tokens is recorded, but not which request had left them: none are subtracted. Requests without counted tokens, such as
rejected ones, are left out.
"""

import math
from array import array
from collections.abc import Iterable
from itertools import chain
from pathlib import Path
from typing import Final, NamedTuple

from forebay.gateway.records.writer import RecordLog, folders, numbered
from forebay.sim.load.columns import Columns
from forebay.sim.load.traces.lines import ROWS_MAX, SPAN_S_MAX, TOKENS_MAX, BadLine
from forebay.wire import records
from forebay.wire.records import Decision

MODELS_SHOWN: Final = 8
"""Most model names in an error."""


class Logged(NamedTuple):
    """The recorded requests, and what was left out."""

    columns: Columns
    uncounted: int
    """Requests without tokens."""
    damaged: int
    """Damaged parts of files."""


def files(folder: Path) -> list[Path]:
    """The decision files of a cluster's or a gateway's records folder. Raises OSError."""
    places = (folder, *folders(folder))
    return [path for place in places for _, path in numbered(place, RecordLog.STEM, RecordLog.SUFFIX)]


def decisions(contents: Iterable[bytes], model: str = "") -> Logged:
    """Read decision files. `model`: the model to select, empty if there is only one. Raises `BadLine`."""
    at_s, prompts, outputs = array("d"), array("i"), array("i")
    tenants: list[str] = []
    models: set[str] = set()
    uncounted = damaged = 0
    for content in contents:
        read = records.payloads(content)
        damaged += read.damaged
        for record in chain.from_iterable(map(records.decisions, read.whole)):
            if record.model:  # requests rejected before routing have none
                models.add(record.model)
            if model and record.model != model:
                continue
            if not record.prompt_tokens:
                uncounted += 1
                continue
            at_s.append(_came_s(record, at_s[0] if at_s else None))
            prompts.append(record.prompt_tokens)
            outputs.append(record.completion_tokens or 1)
            tenants.append(record.tenant)
            if len(at_s) > ROWS_MAX:
                raise BadLine(f"there are more than {ROWS_MAX:,} records")
    if len(models) > 1 and not model:
        raise BadLine(f"there are records of several models, one must be chosen (--model): {_some(models)}")
    if model and model not in models:
        raise BadLine(f"there is no record of the model {model!r}, but of: {_some(models) or 'none'}")
    requests = Columns(at_s, prompts, outputs, tenants=tenants if any(tenants) else ())
    return Logged(requests.in_order().from_zero(), uncounted, damaged)


def _came_s(record: Decision, first_s: float | None) -> float:
    """When a request arrived, seconds since the epoch. Raises `BadLine`."""
    at = record.ts - record.total_s
    if not math.isfinite(at) or (first_s is not None and abs(at - first_s) > SPAN_S_MAX):
        raise BadLine(f"the record of {record.request_id!r} has a time more than a year off the first")
    if not 0 < record.prompt_tokens <= TOKENS_MAX or not 0 <= record.completion_tokens <= TOKENS_MAX:
        raise BadLine(f"the record of {record.request_id!r} has tokens outside of 0 to {TOKENS_MAX:,}")
    return at


def _some(models: set[str]) -> str:
    names = sorted(models)
    return ", ".join(names[:MODELS_SHOWN]) + (", …" if len(names) > MODELS_SHOWN else "")
