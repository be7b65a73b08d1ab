"""The model server compared with others: the results of `bench/server/run.py`."""

from collections.abc import Mapping
from typing import Final

import msgspec

from forebay.cli.measured.tables import Table, figure, machine, shown

FIGURES: Final = (
    ("closed", "per_s", "requests/s"),
    ("closed", "cpu_us", "CPU per request, µs"),
    ("closed", "pss_mb", "memory, MB"),
    ("open", "per_s", "requests/s at 70 % load"),
    ("open", "p50_ms", "p50 at 70 % load, ms"),
    ("open", "p99_ms", "p99 at 70 % load, ms"),
)
"""Columns of a model's table: load, figure, label."""
BUSY: Final = "core busy at 70 % load"
"""The last column: CPU per request times requests per second."""
P99_NOTE: Final = (
    "At 70 % of its throughput, a server that batches keeps its core busy: requests that arrive while the model "
    "runs form the next batch. Its p99 is thus about the time of two runs, which grow with the load: the same "
    "runtime behind a faster server has a higher p99 at 70 % of its own throughput, and a lower one at the same "
    "rate. Batches are smaller there than in a closed loop and requests cost more, so the core is more than 70 % "
    "busy; a server that is nearly always busy catches up slowly after a pause of the machine."
)
BOLD: Final = "bold: missed; *each at 70 % of its own throughput* is a higher load for the faster server"
CEILINGS: Final = (
    "**Ceilings of the missed throughput goals**: an estimate of what a server without any cost of its own reaches. "
    "Over HTTP that is `bare-http`, the runtime behind sockets in C, which is a measurement like the others. Over "
    "gRPC, or where it was not measured, it is the runtime alone. A goal well above its ceiling needs a faster "
    "model, not a faster server."
)
CEILING_COLUMNS: Final = ("model", "server", "compared with", "goal", "ceiling", "reached", "of the ceiling")
PARTS: Final = "**Where the time goes** (in a closed loop; `bare` and `bare-http` are one process):"
PART_COLUMNS: Final = ("model", "server", "CPU per request, µs", "of the server's process", "of the model's process")
TRITON: Final = "triton"
"""The peer whose first process is the server alone, as it is of ours."""
TURNS_NOTE: Final = (
    "For throughput, both servers of a pair are loaded at once and have the core in turns of 0.2 s, so that changes "
    "of the machine's speed favour neither."
)
ENSEMBLE: Final = "ranking"
ENSEMBLE_NOTE: Final = (
    f"`{ENSEMBLE}` is an ensemble of three models: 200 candidates for a user, a network that scores each, and the "
    "ten best. Forebay runs its steps in one process (`forebay.in_process`), the other servers and the bare runtime "
    "run the three files one after the other in one process. `forebay-apart` and `triton-apart` are ensembles of "
    "three models in processes of their own."
)
LARGE: Final = "ranking-large"
LARGE_NOTE: Final = f"`{LARGE}` is the same with 1,000 candidates."
BARE_NOTE: Final = (
    "All servers are configured for the same largest batch. `bare` runs batches of as many rows as are fastest for "
    "the runtime, `bare-whole` the largest ones: what a layer makes of a large batch outgrows the core's cache. "
    "Forebay finds out how many rows of a batch to run at once."
)
SUMMARY_NOTE: Final = (
    "`bare` is the runtime alone, with full batches. `-grpc` and `-json` are the forms of requests; without either "
    "they are binary tensors over HTTP."
)
THROUGHPUT: Final = "throughput, at least"
"""A goal of `bench/server/goals.py`."""
BARE: Final = "bare"
"""The model's runtime alone."""
BARE_HTTP: Final = "bare_http"
"""The runtime behind sockets, without a server."""
GRPC: Final = "_grpc"
"""Suffix of servers measured over gRPC, for which that is no lower bound of the cost."""


class _Goal(msgspec.Struct):
    """One of our servers compared with another."""

    model: str
    goal: str
    ours: str
    beside: str
    bound: float
    value: float
    met: bool


class _Result(msgspec.Struct):
    """bench/server/results.json: model → server → load → figure."""

    rounds: int
    machine: dict[str, int | str]
    versions: dict[str, str]
    figures: dict[str, dict[str, dict[str, dict[str, float]]]]
    goals: list[_Goal]
    beside: str = ""
    """What else sets these figures apart."""


def tables(document: bytes) -> list[Table]:
    """One table for each model, and one of the goals. Raises `msgspec.MsgspecError` for other documents."""
    result = msgspec.json.decode(document, type=_Result)
    how = machine(result.machine, result.rounds, result.beside)
    versions = {name: version.partition(",")[0] for name, version in result.versions.items()}
    made = [
        Table(
            f"**Model servers, `{model}`, on one core** ({how}):",
            ("", *(text for _, _, text in FIGURES), BUSY),
            [_row(name, versions.get(name, ""), loads) for name, loads in servers.items()],
        )
        for model, servers in result.figures.items()
    ]
    if result.goals:
        notes = " ".join([TURNS_NOTE, P99_NOTE, *_model_notes(result)])
        made.append(_goals(result.goals, f"**Goals of the model server** ({BOLD}):", notes))
    return [*made, *_ceilings(result, CEILINGS), *_parts(result)]


def elsewhere(document: bytes) -> list[Table]:
    """The goals on another machine. Raises `msgspec.MsgspecError` for other documents."""
    result = msgspec.json.decode(document, type=_Result)
    where = machine(result.machine, result.rounds, result.beside)
    bare = ", ".join(f"{figure(_per_s(servers, BARE))} of `{name}`" for name, servers in result.figures.items())
    title = f"**The same on another machine** ({where}; requests/s of `{BARE}` there: {bare}):"
    return [
        _goals(result.goals, title, " ".join(_model_notes(result))),
        *_ceilings(result, "**Ceilings of the missed throughput goals there**:"),
    ]


def summary(document: bytes) -> list[Table]:
    """Throughput as a multiple of others'. Raises `msgspec.MsgspecError` for other documents."""
    result = msgspec.json.decode(document, type=_Result)
    ratios = {
        (goal.model, f"{shown(goal.ours)} / {shown(goal.beside)}"): f"{goal.value:.2f}x"
        for goal in result.goals
        if goal.goal == THROUGHPUT and goal.ours != BARE_HTTP
    }
    pairs = list(dict.fromkeys(pair for _, pair in ratios))
    rows = [(model, *(ratios.get((model, pair), "-") for pair in pairs)) for model in result.figures]
    how = machine(result.machine, result.rounds, result.beside)
    title = f"**Requests per second of model servers on one core, as ratios** ({how}):"
    return [Table(title, ("model", *pairs), rows, SUMMARY_NOTE)] if pairs else []


def _model_notes(result: _Result) -> list[str]:
    notes = [BARE_NOTE]
    if ENSEMBLE in result.figures:
        notes.append(ENSEMBLE_NOTE)
    if LARGE in result.figures:
        notes.append(LARGE_NOTE)
    return notes


def _ceilings(result: _Result, title: str) -> list[Table]:
    """The ceilings of missed throughput goals; empty if none is missed, or the ceiling is unknown."""
    reached = {(goal.model, goal.ours, goal.beside): goal.value for goal in result.goals if goal.goal == THROUGHPUT}
    rows = []
    for goal in result.goals:
        of_bare = reached.get((goal.model, goal.ours, BARE), 0.0)
        if goal.met or goal.goal != THROUGHPUT or not of_bare or goal.ours == BARE_HTTP:
            continue
        share = 1.0 if goal.ours.endswith(GRPC) else reached.get((goal.model, BARE_HTTP, BARE), 1.0)
        values = (f"{goal.bound:.2f}x", f"{goal.value / of_bare * share:.2f}x", f"{goal.value:.2f}x")
        rows.append((goal.model, shown(goal.ours), shown(goal.beside), *values, f"{of_bare / share:.0%}"))
    return [Table(title, CEILING_COLUMNS, rows)] if rows else []


def _parts(result: _Result) -> list[Table]:
    """What the server's process has of the CPU of a request, and the model's; empty: it was not measured."""
    divided = {goal.ours for goal in result.goals} | {g.beside for g in result.goals if g.beside.startswith(TRITON)}
    rows: list[tuple[str, ...]] = []
    for model, servers in result.figures.items():
        for name, loads in servers.items():
            closed = loads.get("closed", {})
            if name in (BARE, BARE_HTTP) and "cpu_us" in closed:
                rows.append((model, shown(name), figure(closed["cpu_us"]), "", ""))
            elif name in divided and "server_us" in closed:
                whole, server = closed["cpu_us"], closed["server_us"]
                rows.append((model, shown(name), *map(figure, (whole, server, whole - server))))
    return [Table(PARTS, PART_COLUMNS, rows)] if any(row[-1] for row in rows) else []


def _per_s(servers: Mapping[str, Mapping[str, Mapping[str, float]]], name: str) -> float:
    return servers.get(name, {}).get("closed", {}).get("per_s", 0.0)


def _row(name: str, version: str, loads: Mapping[str, Mapping[str, float]]) -> tuple[str, ...]:
    values = (loads.get(load, {}).get(key) for load, key, _ in FIGURES)
    cells = ("-" if value is None else figure(value) for value in values)
    title = f"{shown(name)} {version}".strip()
    if rows := loads.get("closed", {}).get("rows"):
        title += f", {figure(rows)} rows at once"
    paced = loads.get("open", {})
    busy = f"{paced['cpu_us'] * paced['per_s'] / 1e6:.0%}" if "cpu_us" in paced else "-"
    return (f"**{title}**" if name == "forebay" else title, *cells, busy)


def _goals(goals: list[_Goal], title: str, note: str = "") -> Table:
    """A row for each goal of each of our servers, a column for each server that it is compared with."""
    beside = list(dict.fromkeys(_against(goal) for goal in goals))
    rows: dict[tuple[str, ...], dict[str, str]] = {}
    for goal in goals:
        bound = figure(goal.bound) + ("x" if goal.beside else "")
        value = f"{goal.value:.2f}x" if goal.beside else figure(goal.value)
        row = rows.setdefault((goal.model, shown(goal.ours), goal.goal, bound), {})
        row[_against(goal)] = value if goal.met else f"**{value}**"
    return Table(
        title,
        ("model", "server", "goal", "bound", *beside),
        [(*head, *(cells.get(name, "") for name in beside)) for head, cells in rows.items()],
        note,
    )


def _against(goal: _Goal) -> str:
    return f"vs {shown(goal.beside)}" if goal.beside else "value"
