"""What gateways have written down of requests: outcomes by the usage ledgers, times by the decision records.

Ledgers tell whole days (UTC) and are kept longest, so outcomes count from the midnight before the period on. Decision
records are kept for a shorter time; the newest are read, and what is made of them says since when.
"""

from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Final

from forebay.control.standby.sla import Served
from forebay.core.availability.budget import Kept, Requests, kept
from forebay.core.cluster import Slo
from forebay.gateway.records.ledger import usage
from forebay.gateway.records.saved import DAY_S
from forebay.gateway.records.writer import RecordLog, folders, numbered
from forebay.wire.records import Decision, decisions, payloads

READ_BYTES_MAX: Final = 32 * 1024 * 1024
"""Most bytes of decision records that are read: control does other things too."""
PROMISES: Final = {"ttft": "ttft_p99_ms", "tpot": "tpot_p99_ms", "latency": "latency_p99_ms"}
"""Promises about times, by their name, and the setting that makes them."""


def delivered(root: Path, since: float, until: float, promised: Mapping[str, Slo]) -> dict[str, Served]:
    """What became of requests between two times, seconds since the epoch, by model. Raises OSError."""
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


def _kept(root: Path, period: tuple[float, float], wanted: Mapping[tuple[str, str], float]) -> dict[str, list[Kept]]:
    """How promises of times were kept, by model. `wanted`: what was promised, seconds, by model and promise."""
    times: dict[tuple[str, str], list[float]] = {key: [] for key in wanted}
    first = period[1]
    for record in _newest(root):
        if not period[0] <= record.ts <= period[1]:
            continue
        first = min(first, record.ts)
        if record.code == "ok":
            for promise, seconds in _times(record):
                if (record.model, promise) in times:
                    times[record.model, promise].append(seconds)
    found: dict[str, list[Kept]] = {}
    for (model, promise), seen in times.items():
        told = kept(promise, wanted[model, promise], first, seen)
        if told is not None:
            found.setdefault(model, []).append(told)
    return found


def _times(record: Decision) -> Iterator[tuple[str, float]]:
    yield "latency", record.total_s
    if record.ttft_s > 0:
        yield "ttft", record.ttft_s
        if record.completion_tokens > 1:
            yield "tpot", max(0.0, record.total_s - record.ttft_s) / (record.completion_tokens - 1)


def _newest(root: Path) -> Iterator[Decision]:
    """The decisions in the newest files of all gateways, as far as they are read."""
    for path in _files(root):
        try:
            content = path.read_bytes()
        except FileNotFoundError:  # it was the oldest, and has just been removed
            continue
        for payload in payloads(content).whole:
            yield from decisions(payload)


def _files(root: Path) -> Iterable[Path]:
    """The newest files of decisions, no more of them together than may be read; of each gateway the newest anyway."""
    found: list[tuple[float, Path]] = []
    for folder in folders(root):
        for _, path in numbered(folder, RecordLog.STEM, RecordLog.SUFFIX):
            found.append((path.stat().st_mtime, path))
    room = READ_BYTES_MAX
    for _, path in sorted(found, reverse=True):
        size = path.stat().st_size
        if size > room and room < READ_BYTES_MAX:
            return
        room -= size
        yield path
