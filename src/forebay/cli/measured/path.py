"""The whole path compared with the bare runtime: the results of `bench/path/run.py`."""

import msgspec

from forebay.cli.measured.tables import Table, figure, machine


class _Result(msgspec.Struct):
    """bench/path/results.json: scenario → figure."""

    rounds: int
    figures: dict[str, dict[str, float]]
    machine: dict[str, int | str]


def tables(document: bytes) -> list[Table]:
    """One table. Raises `msgspec.MsgspecError` for other documents."""
    result = msgspec.json.decode(document, type=_Result)
    rows = []
    for scenario, f in result.figures.items():
        unit = "texts" if scenario == "embed" else "tokens"
        spread = f"{f['ratio']:.2f} ({f['ratio_min']:.2f} to {f['ratio_max']:.2f})"
        latency = (
            f"p99 {figure(f['half_load_p99_ms'])} ms at half load"
            if scenario == "embed"
            else f"TTFT {figure(f['ttft_p50_ms'])} ms, TPOT {figure(f['tpot_p50_ms'])} ms (p50)"
        )
        speeds = (figure(f[f"{kind}_{unit}_per_s"]) for kind in ("bare", "path"))
        rows.append((scenario.replace("_", ", concurrency "), unit, *speeds, spread, latency))
    bare = "chat: alternating slices of seconds; embeddings: one session, batches of 32, sorted by length"
    how = machine(result.machine, result.rounds)
    title = f"**Throughput per second through Forebay and of the bare runtime** ({bare}; {how}):"
    return [Table(title, ("load", "unit", "bare runtime", "through Forebay", "ratio", "latency"), rows)]
