"""Interactive requests during a flood of batch requests: the results of `bench/priority/run.py`."""

from typing import Final

import msgspec

from forebay.cli.measured.tables import Table, figure, machine

PHASES: Final = {
    "alone": "half load, alone",
    "batch_flood": "with the flood as `batch`",
    "batch_stream_flood": "with the flood as `batch`, streamed",
    "plain_flood": "with the flood without priorities",
    "light": "light load (15 %), alone",
    "batch_flood_light": "with the flood as `batch`, light load",
    "batch_stream_flood_light": "with the flood as `batch`, streamed, light load",
}


class _Run(msgspec.Struct):
    """The results of one model: phase → figure."""

    rounds: int
    capacity_requests_per_s: float
    figures: dict[str, dict[str, float]]


class _Result(msgspec.Struct):
    """bench/priority/results.json: model → run."""

    machine: dict[str, int | str]
    models: dict[str, _Run]


def tables(document: bytes) -> list[Table]:
    """One table of all models. Raises `msgspec.MsgspecError` for other documents."""
    result = msgspec.json.decode(document, type=_Result)
    rows: list[tuple[str, ...]] = []
    for model, run in result.models.items():
        for phase, name in PHASES.items():
            f = run.figures.get(phase)
            if f is None:
                continue
            ttft = [f"{figure(f[f'ttft_{q}_ms'])} ms" for q in ("p50", "p95", "p99")]
            ratio = f"{f['ttft_p99_ratio']:.2f}x" if "ttft_p99_ratio" in f else ""
            flood = figure(f["flood_requests_per_s"]) if "flood_requests_per_s" in f else ""
            share = f"{f['flood_ratio']:.0%}" if "flood_ratio" in f else ""
            rows.append((model, name, *ttft, ratio, flood, share))
    rounds = min(run.rounds for run in result.models.values())
    how = machine(result.machine, rounds)
    title = f"**Interactive requests during a flood of batch requests** ({how}):"
    columns = ("model", "", "TTFT p50", "p95", "p99", "p99 vs alone", "flood, requests/s", "vs flood alone")
    return [Table(title, columns, rows)]
