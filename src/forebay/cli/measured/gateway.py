"""The gateway compared with other proxies: the results of `bench/gateway/run.py` and `behave.py`."""

from collections.abc import Mapping, Sequence
from typing import Final

import msgspec

from forebay.cli.measured.tables import Table, figure, machine, shown

BUILD_BEFORE: Final = "vs the build before"
"""So the goals end that hold a build against an older one."""
NOTES: Final = {
    "forebay": "`forebay` has everything on: keys and limits, congestion-priced routing, decision records, "
    "audit log, usage ledger.",
    "forebay_lean": "`forebay-lean` counts requests and keeps no records, which is what the peers are set up to do. "
    "Both are the compiled wheel of `make wheel`.",
    "forebay_interpreted": "`forebay-interpreted` is a plain install, not compiled.",
    "forebay_lean_interpreted": "`forebay-lean-interpreted` is a plain install that counts requests and keeps no "
    "records.",
    "uvloop": "`uvloop` is the event loop that Forebay runs on, forwarding bytes without parsing them.",
    "litellm": "LiteLLM is measured under a lighter load, as it cannot sustain this one.",
}
"""Notes on columns."""
FIGURES: Final = (
    ("request_1k", "cpu_us", 1, "CPU per 1 KB request, µs"),
    ("request_32k", "cpu_us", 1, "CPU per 32 KB request, µs"),
    ("event_64x1ms", "cpu_us", 1, "CPU per stream event, 64 streams, µs"),
    ("event_512x5ms", "cpu_us", 1, "CPU per stream event, 512 streams, µs"),
    ("event_512x10ms", "cpu_us", 1, "CPU per stream event, 512 streams, half the event rate, µs"),
    ("event_64x1ms", "coalesced", 100, "events coalesced with others, 64 streams, %"),
    ("event_512x5ms", "coalesced", 100, "events coalesced with others, 512 streams, %"),
    ("event_512x10ms", "coalesced", 100, "events coalesced with others, 512 streams, half the event rate, %"),
    ("event_512x20ms", "coalesced", 100, "events coalesced with others, 512 streams, a quarter of the event rate, %"),
    ("event_512x5ms", "delivered", 100, "events delivered, 512 streams, %"),
    ("event_512x10ms", "delivered", 100, "events delivered, 512 streams, half the event rate, %"),
    (
        "event_512x20ms",
        "delivered",
        100,
        "events delivered, 512 streams, a quarter of the event rate, %",
    ),
    ("ttft", "added_p50_us", 1, "latency added to the first event, synchronised streams, p50, µs"),
    ("ttft", "added_p99_us", 1, "latency added to the first event, synchronised streams, p99, µs"),
    ("ttft_random", "added_p50_us", 1, "latency added to the first event, independent streams, p50, µs"),
    ("ttft_random", "added_p99_us", 1, "latency added to the first event, independent streams, p99, µs"),
    (
        "ttft_awake",
        "added_p50_us",
        1,
        "latency added to the first event, independent streams, polling cores, p50, µs",
    ),
    (
        "ttft_awake",
        "added_p99_us",
        1,
        "latency added to the first event, independent streams, polling cores, p99, µs",
    ),
    ("memory", "stream_kb", 1, "memory per open stream, KB"),
    ("memory", "idle_mb", 1, "memory when idle, MB"),
)
"""Rows of the table of costs: scenario, figure, factor, label."""
IN_STEP: Final = (
    "Of 100 streams per second, synchronised ones begin exactly every 10 ms, which is also the interval of their "
    "events: a first event arrives in a burst with an event of every other stream. Independent ones begin at "
    "random times."
)
"""Explains the rows of first events."""
ROUNDS: Final = (
    "Both figures of a ratio were measured within half a minute of each other; the table shows the median of several "
    "ratios, and their range in brackets."
)
"""Explains how the ratios of the goals were measured."""
BARE: Final = ("nginx", "uvloop")
"""Proxies that forward bytes and do nothing else: a lower bound for the goals."""
DELIVERED_MIN: Final = 0.99
"""Share of events delivered in time below which events queue."""
BEHAVIOUR: Final = {
    "slow_reader_mb": "memory growth while a client does not read a stream of 66 MB, MB",
    "left_midstream_ms": "time until the replica sees a disconnect in the middle of a stream, ms",
    "left_before_first_byte_ms": "time until the replica sees a disconnect before the first byte, ms",
    "backend_connections": "connections to replicas for 1,000 requests over 64 connections",
}


class _Goal(msgspec.Struct):
    """An upper bound `most`: a ratio to a peer, or in the figure's own unit."""

    goal: str
    most: float
    ratio: bool
    met: bool | None
    values: dict[str, float | None]
    rounds: list[float] = []
    """The value of each round, with everything on."""


class _Result(msgspec.Struct):
    """bench/gateway/results.json: proxy → scenario → figure."""

    rounds: int
    versions: dict[str, str]
    figures: dict[str, dict[str, dict[str, float]]]
    machine: dict[str, int | str]
    goals: list[_Goal] = []
    beside: str = ""
    """What ran on other cores meanwhile."""


class _Behaviour(msgspec.Struct):
    """The behaviour of one proxy; None: not measurable."""

    value: float | None
    passed: bool


class _BehaviourResult(msgspec.Struct):
    """bench/gateway/behaviour.json: proxy → figure."""

    versions: dict[str, str]
    limits: dict[str, float]
    behaviour: dict[str, dict[str, _Behaviour]]


def costs(document: bytes) -> list[Table]:
    """The cost of each proxy. Raises `msgspec.MsgspecError` for other documents."""
    result = msgspec.json.decode(document, type=_Result)
    names = list(result.versions)
    rows = []
    for scenario, key, factor, says in FIGURES:
        values = [result.figures.get(name, {}).get(scenario, {}).get(key) for name in names]
        if any(value is not None for value in values):
            cells = ["-" if value is None else figure(value * factor) for value in values]
            ours = (f"**{cell}**" if name == "forebay" else cell for name, cell in zip(names, cells, strict=True))
            rows.append((says, *ours))
    notes = [says for name, says in NOTES.items() if name in names]
    if any("ttft_random" in found for found in result.figures.values()):
        notes.append(IN_STEP)
    title = f"**Cost of the gateway and other proxies, on one core** ({machine(result.machine, result.rounds)}):"
    return [Table(title, ("", *_named(result.versions)), rows, " ".join(notes))]


def goals(document: bytes) -> list[Table]:
    """The goals of the gateway. Raises `msgspec.MsgspecError` for other documents."""
    result = msgspec.json.decode(document, type=_Result)
    return _goals(result, "**Goals of the gateway**, with everything on:")


def elsewhere(document: bytes) -> list[Table]:
    """The goals on a machine with a slower kernel. Raises `msgspec.MsgspecError` for other documents."""
    result = msgspec.json.decode(document, type=_Result)
    where = machine(result.machine, result.rounds, result.beside)
    event = figure(result.figures["nginx"]["event_64x1ms"]["cpu_us"])
    return _goals(result, f"**The same on another machine** ({where}; nginx needs {event} µs per event there):")


def since(document: bytes) -> list[Table]:
    """A later build beside the measured one. Raises `msgspec.MsgspecError` for other documents."""
    result = msgspec.json.decode(document, type=_Result)
    result.figures, result.goals = {}, [goal for goal in result.goals if goal.goal.endswith(BUILD_BEFORE)]
    for goal in result.goals:
        goal.values = {"forebay": goal.values.get("forebay")}
    where = machine(result.machine, result.rounds)
    return _goals(result, f"**The code since these figures beside the code that was measured** ({where}):")


def _goals(result: _Result, title: str) -> list[Table]:
    goals = result.goals
    if not goals:
        return []
    show = {True: _share, False: figure}
    words = {True: "yes", False: "**missed**", None: "not measured"}
    ours = list(goals[0].values)
    rows = []
    for goal in goals:
        values = (goal.values.get(name) for name in ours)
        cells = ["-" if value is None else show[goal.ratio](value) for value in values]
        if len(goal.rounds) > 1:
            cells[0] += f" ({show[goal.ratio](min(goal.rounds))} to {show[goal.ratio](max(goal.rounds))})"
        rows.append((goal.goal, f"≤ {show[goal.ratio](goal.most)}", *cells, words[goal.met]))
    columns = ("goal", "at most", *map(shown, ours), "met")
    notes = [ROUNDS] if any(len(goal.rounds) > 1 for goal in goals) else []
    note = " ".join([*notes, *_missed_by_relays(goals), *_saturated(result.figures)])
    return [Table(title, columns, rows, note)]


def _missed_by_relays(goals: Sequence[_Goal]) -> list[str]:
    """Lists the missed goals that bare relays miss, too."""
    found = []
    for goal in goals:
        values = {name: goal.values.get(name) for name in BARE}
        missed = [
            f"{name} {_in_its_unit(goal, value)}" for name, value in values.items() if value and value > goal.most
        ]
        if missed and goal.met is False:
            found.append(f"{goal.goal} ({', '.join(missed)})")
    if not found:
        return []
    return [
        f"{' and '.join(BARE)} forward bytes and do none of a gateway's other work. They also miss: "
        f"{'; '.join(found)}."
    ]


def _in_its_unit(goal: _Goal, value: float) -> str:
    return _share(value) if goal.ratio else figure(value)


def _saturated(figures: Mapping[str, Mapping[str, Mapping[str, float]]]) -> list[str]:
    """Says so if the highest load exceeds what one core can deliver."""
    shares = {name: found.get("event_512x5ms", {}).get("delivered", 0.0) for name, found in figures.items()}
    direct = shares.pop("direct", 1.0)
    best = max(shares, key=shares.__getitem__, default="")
    if not best or not 0.0 < shares[best] < DELIVERED_MIN:
        return []
    low = direct < DELIVERED_MIN
    return [
        "512 streams with an event every 5 ms are 102,400 events a second, more than one core can forward here "
        f"(best: {shown(best)}, {100 * shares[best]:.1f} %): events queue in sockets, and one read returns several. "
        "How many events a proxy itself coalesces shows at the loads that the core can sustain."
        + (f" Without a proxy {100 * direct:.1f} % arrive, as one core sends and reads them." if low else "")
    ]


def behaviour(document: bytes) -> list[Table]:
    """How each proxy copes with difficult clients. Raises `msgspec.MsgspecError` for other documents."""
    result = msgspec.json.decode(document, type=_BehaviourResult)
    rows = []
    for key, says in BEHAVIOUR.items():
        cells = []
        for name in result.versions:
            seen = result.behaviour.get(name, {}).get(key)
            value = "-" if seen is None else "failed" if seen.value is None else figure(seen.value)
            cells.append(value if seen is None or seen.passed else f"**{value}**")
        rows.append((says, f"≤ {figure(result.limits[key])}", *cells))
    columns = ("", "at most", *_named(result.versions))
    return [Table("**Behaviour with slow and disconnecting clients** (bold: over the limit):", columns, rows)]


def _share(ratio: float) -> str:
    return f"{ratio:.2f}x" if ratio >= 0.1 or ratio <= 0 else f"1/{1 / ratio:.0f}"


def _named(versions: Mapping[str, str]) -> Sequence[str]:
    return [f"{shown(name)} {version}".strip() for name, version in versions.items()]
