"""Delivered service levels from the gateways' records: outcomes from the usage ledgers, latencies from the decisions.

Ledgers have whole days (UTC) and are kept longest, so outcomes count from the midnight before the period. Decision
records are kept for a shorter time; the newest are read, and results say since when.
"""

from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Final

from forebay.control.standby.sla import Served
from forebay.core.availability.budget import ObjectiveResult, Requests, objective_result
from forebay.core.cluster import Slo
from forebay.core.errors import OK
from forebay.gateway.records.ledger import usage
from forebay.gateway.records.saved import DAY_S
from forebay.gateway.records.writer import RecordLog, folders, numbered
from forebay.wire.records import Decision, decisions, payloads

READ_BYTES_MAX: Final = 32 * 1024 * 1024
"""Maximum bytes of decision records to read, as control has other work too."""
PROMISES: Final = {"ttft": "ttft_p99_ms", "tpot": "tpot_p99_ms", "latency": "latency_p99_ms"}
"""Latency objectives by name, with the setting that defines them."""


def delivered(root: Path, since: float, until: float, promised: Mapping[str, Slo]) -> dict[str, Served]:
    """Outcomes and latencies of requests between two times (seconds since the epoch), by model. Raises OSError."""
    outcomes = _outcomes(root, int(since // DAY_S))
    wanted = {
        (name, promise): getattr(slo, key) / 1000
        for name, slo in promised.items()
        for promise, key in PROMISES.items()
        if getattr(slo, key) is not None
    }
    times = _kept(root, (since, until), wanted) if wanted else {}
    begin = since // DAY_S * DAY_S
    found = {}
    for name in sorted({*outcomes, *times}):
        of = outcomes.get(name, {})
        ok, cancelled, refused = (of.get(key, 0) for key in ("ok", "cancelled", "client"))
        failed = sum(of.values()) - ok - cancelled - refused
        requests = Requests(begin, until, ok=ok, failed=failed, refused=refused, cancelled=cancelled)
        found[name] = Served(requests, tuple(times.get(name, ())))
    return found


def _outcomes(root: Path, day_first: int) -> dict[str, dict[str, int]]:
    """Requests by model and outcome, of all gateways."""
    found: dict[str, dict[str, int]] = {}
    for folder in folders(root):
        for (_, (_, model, outcome)), sums in usage(folder, day_first).items():
            of = found.setdefault(model, {})
            of[outcome] = of.get(outcome, 0) + sums.requests
    return found


def _kept(
    root: Path, period: tuple[float, float], wanted: Mapping[tuple[str, str], float]
) -> dict[str, list[ObjectiveResult]]:
    """How latency objectives were met, by model. `wanted`: the objective in seconds, by model and name."""
    times: dict[tuple[str, str], list[float]] = {key: [] for key in wanted}
    first = period[1]
    for record in _newest(root):
        if not period[0] <= record.ts <= period[1]:
            continue
        first = min(first, record.ts)
        if record.code == OK:
            for promise, seconds in _times(record):
                if (record.model, promise) in times:
                    times[record.model, promise].append(seconds)
    found: dict[str, list[ObjectiveResult]] = {}
    for (model, promise), seen in times.items():
        result = objective_result(promise, wanted[model, promise], first, seen)
        if result is not None:
            found.setdefault(model, []).append(result)
    return found


def _times(record: Decision) -> Iterator[tuple[str, float]]:
    yield "latency", record.total_s
    if record.ttft_s > 0:
        yield "ttft", record.ttft_s
        if record.completion_tokens > 1:
            yield "tpot", max(0.0, record.total_s - record.ttft_s) / (record.completion_tokens - 1)


def _newest(root: Path) -> Iterator[Decision]:
    """The decisions in the newest files of all gateways, up to the size limit."""
    for path in _files(root):
        try:
            content = path.read_bytes()
        except FileNotFoundError:  # it was the oldest, and has just been removed
            continue
        for payload in payloads(content).whole:
            yield from decisions(payload)


def _files(root: Path) -> Iterable[Path]:
    """The newest decision files by time, up to the size limit; the newest one in any case."""
    found: list[tuple[float, Path, int]] = []
    for folder in folders(root):
        for _, path in numbered(folder, RecordLog.STEM, RecordLog.SUFFIX):
            with suppress(FileNotFoundError):  # as in `_newest`
                status = path.stat()
                found.append((status.st_mtime, path, status.st_size))
    room = READ_BYTES_MAX
    for _, path, size in sorted(found, reverse=True):
        if size > room and room < READ_BYTES_MAX:
            return
        room -= size
        yield path
