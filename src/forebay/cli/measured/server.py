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
P99_NOTE: Final = (
    "At 70 % of its throughput, a server that batches keeps its core busy: requests that arrive while the model runs "
    "form the next batch. Its p99 is thus about the time of two runs, which grow with the load: the same runtime "
    "behind a faster server has a higher p99 at 70 % of its own throughput, and a lower one at the same rate."
)
BOLD: Final = "bold: missed; *each at 70 % of its own throughput* is a higher load for the faster server"
CEILINGS: Final = (
    "**Ceilings of the missed throughput goals**: the throughput of a server without any cost of its own, from the "
    "figures above. Its core still runs the model (`bare`) and, over HTTP, reads requests and writes responses "
    "(`socket`). A goal above its ceiling needs a faster model, not a faster server: where a model takes long, the "
    "cost of serving it matters little, and none is 1.2 times as fast as a server that nearly reaches the runtime."
)
TURNS_NOTE: Final = (
    "For throughput, both servers of a pair are loaded at once and have the core in turns of 0.2 s, so that changes "
    "of the machine's speed favour neither."
)
ENSEMBLE: Final = "ranking"
APART: Final = ("forebay_apart", "triton_apart")
"""With the steps of an ensemble in processes of their own."""
ENSEMBLE_NOTE: Final = (
    f"`{ENSEMBLE}` is an ensemble of three models: 200 candidates for a user, a network that scores each, and the "
    "ten best."
)
IN_PROCESS_NOTE: Final = (
    f"{ENSEMBLE_NOTE} Forebay runs its steps in one process (`forebay.in_process`), the other servers and the bare "
    "runtime run the three files one after the other in one process. `forebay-apart` and `triton-apart` are "
    "ensembles of three models in processes of their own."
)
LARGE: Final = "ranking-large"
LARGE_NOTE: Final = f"`{LARGE}` is the same with 1,000 candidates."
BARE_NOTE: Final = (
    "All servers are configured for the same largest batch. `bare` runs batches of as many rows as are fastest for "
    "the runtime, `bare-whole` the largest ones: what a layer makes of a large batch outgrows the core's cache. "
    "Forebay finds out how many rows of a batch to run at once."
)
WHOLE_NOTE: Final = "`bare` ran the largest batches."
APART_NOTE: Final = (
    f"{ENSEMBLE_NOTE} Forebay and Triton passed tensors between the processes of the models; the other servers and "
    "the bare runtime ran the three files one after the other in one process."
)
THROUGHPUT: Final = "throughput, at least"
"""A goal of `bench/server/goals.py`."""
BARE: Final = "bare"
"""The model's runtime alone."""
BARE_TUNED: Final = "bare_tuned"
BARE_WHOLE: Final = "bare_whole"
"""The same with the settings of Forebay's processes, and in batches as large as the model takes."""
SOCKET: Final = "socket"
"""A server that reads requests and answers them without a model."""
GRPC: Final = "_grpc"
"""Suffix of servers measured over gRPC, for which `SOCKET` is no lower bound of the cost."""


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
            ("", *(text for _, _, text in FIGURES)),
            [_row(name, versions.get(name, ""), loads) for name, loads in servers.items()],
        )
        for model, servers in result.figures.items()
    ]
    if result.goals:
        notes = " ".join([TURNS_NOTE, P99_NOTE, *_model_notes(result)])
        made.append(_goals(result.goals, f"**Goals of the model server** ({BOLD}):", notes))
    return [*made, *_ceilings(result, CEILINGS)]


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


def micro_batches(document: bytes) -> list[Table]:
    """The goals of a newer version, beside fewer servers. Raises `msgspec.MsgspecError` for other documents."""
    result = msgspec.json.decode(document, type=_Result)
    where = machine(result.machine, result.rounds, result.beside)
    figures = result.figures.items()
    bare = ", ".join(
        f"{figure(_per_s(servers, BARE))} of `{name}`, {figure(_per_s(servers, BARE_WHOLE))} in the largest batches"
        for name, servers in figures
    )
    title = f"**A newer version, which runs micro-batches** ({where}; requests/s of `{BARE}`: {bare}):"
    return [
        _goals(result.goals, title, " ".join(_model_notes(result))),
        *_ceilings(result, "**Ceilings of the throughput goals that it misses**:"),
    ]


def summary(document: bytes) -> list[Table]:
    """The throughput of each server. Raises `msgspec.MsgspecError` for other documents."""
    result = msgspec.json.decode(document, type=_Result)
    names = dict.fromkeys(name for model in result.figures.values() for name in model)
    servers = [name for name in names if name not in (BARE_TUNED, BARE_WHOLE, SOCKET, *APART)]
    rows = [
        (model, *(_speed(figures.get(name, {}), name) for name in servers))
        for model, figures in result.figures.items()
    ]
    how = machine(result.machine, result.rounds, result.beside)
    title = f"**Requests per second of model servers, on one core** ({how}):"
    return [Table(title, ("model", *map(shown, servers)), rows)]


def _model_notes(result: _Result) -> list[str]:
    notes = [BARE_NOTE if any(BARE_WHOLE in servers for servers in result.figures.values()) else WHOLE_NOTE]
    if ENSEMBLE in result.figures:
        notes.append(IN_PROCESS_NOTE if APART[0] in result.versions else APART_NOTE)
    if LARGE in result.figures:
        notes.append(LARGE_NOTE)
    return notes


def _ceilings(result: _Result, title: str) -> list[Table]:
    """The ceilings of missed throughput goals; empty if none is missed, or the ceiling is unknown."""
    reached = {(goal.model, goal.ours, goal.beside): goal.value for goal in result.goals if goal.goal == THROUGHPUT}
    rows = []
    for goal in result.goals:
        of_bare = reached.get((goal.model, goal.ours, BARE), 0.0)
        if goal.met or goal.goal != THROUGHPUT or not of_bare:
            continue
        servers = result.figures[goal.model]
        model, socket = _per_s(servers, BARE), _per_s(servers, SOCKET)
        share = socket / (socket + model) if socket and not goal.ours.endswith(GRPC) else 1.0
        values = (
            f"{goal.bound:.2f}x",
            f"{goal.value / of_bare * share:.2f}x",
            f"{goal.value:.2f}x",
            f"{of_bare / share:.0%}",
        )
        rows.append((goal.model, shown(goal.ours), shown(goal.beside), *values))
    if not rows:
        return []
    return [Table(title, ("model", "server", "compared with", "goal", "ceiling", "reached", "of the ceiling"), rows)]


def _per_s(servers: Mapping[str, Mapping[str, Mapping[str, float]]], name: str) -> float:
    return servers.get(name, {}).get("closed", {}).get("per_s", 0.0)


def _speed(loads: Mapping[str, Mapping[str, float]], name: str) -> str:
    value = loads.get("closed", {}).get("per_s")
    cell = "-" if value is None else figure(value)
    return f"**{cell}**" if name == "forebay" else cell


def _row(name: str, version: str, loads: Mapping[str, Mapping[str, float]]) -> tuple[str, ...]:
    values = (loads.get(load, {}).get(key) for load, key, _ in FIGURES)
    cells = ("-" if value is None else figure(value) for value in values)
    title = f"{shown(name)} {version}".strip()
    if rows := loads.get("closed", {}).get("rows"):
        title += f", {figure(rows)} rows at once"
    return (f"**{title}**" if name == "forebay" else title, *cells)


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
