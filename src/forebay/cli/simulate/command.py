"""The options of `forebay simulate`; its implementation is imported when it runs."""

from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

FLEETS = "forebay, hpa[@TARGET], kpa[@TARGET], apa[@TARGET], slo, static[@N], peak, oracle"
TRACES = "mooncake, azure, servegen, azure-week, hot-prefix, tenants, multi-turn, poisson, burst"


class Depth(StrEnum):
    """What is simulated."""

    POLICY = "policy"
    """Gateways in front of modelled engines, under the load of a trace."""
    FULL = "full"
    """Control, gateways, workers, every byte between them, and faults."""


FileArgument = Annotated[
    Path | None,
    typer.Argument(help="Cluster description (YAML).", show_default="8 replicas of a 70B model on 4 H100 each"),
]
TraceOption = Annotated[
    str | None,
    typer.Option(
        help=f"One of {TRACES}; a trace file in one of these formats; or a folder of decision records.",
        show_default="the first 3,000 requests of mooncake",
    ),
]
PolicyOption = Annotated[
    list[str] | None,
    typer.Option(
        help="Routing policy, Forebay's or another router's; repeatable.",
        show_default="cpr, least_requests, round_robin",
    ),
]
FleetOption = Annotated[
    list[str] | None,
    typer.Option(
        help=f"Autoscaling policy, one of {FLEETS}; repeatable.",
        show_default="none, or the `scale` of the description",
    ),
]
SetOption = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="PATH=VALUE", help="Override a value of the description, such as slo.ttft_s=2."),
]
ScaleOption = Annotated[str, typer.Option(help="Factor on the engine model's step times; several: 0.8,1,1.25.")]
JobsOption = Annotated[
    int | None, typer.Option("--jobs", "-j", help="Replays to run in parallel.", show_default="one for each core")
]


def simulate(
    file: FileArgument = None,
    *,
    trace: TraceOption = None,
    model: Annotated[str, typer.Option(help="Replay only this model's decision records.", show_default=False)] = "",
    speed: Annotated[float, typer.Option(help="Factor on the arrival rate.")] = 1.0,
    policy: PolicyOption = None,
    fleet: FleetOption = None,
    replicas: Annotated[int | None, typer.Option(help="Same as --set replicas=N.")] = None,
    set_: SetOption = None,
    seed: Annotated[int, typer.Option(help="Random seed; the same seed gives the same figures.")] = 0,
    seeds: Annotated[int, typer.Option(help="Number of seeds to run; more than one adds confidence intervals.")] = 1,
    requests: Annotated[int | None, typer.Option("--requests", "-n", help="Only the first N requests.")] = None,
    from_: Annotated[
        float, typer.Option("--from", help="Only requests after this time of the trace, seconds.")
    ] = 0.0,
    until: Annotated[float | None, typer.Option(help="Only requests before this time of the trace, seconds.")] = None,
    scale: ScaleOption = "1",
    jobs: JobsOption = None,
    report: Annotated[Path | None, typer.Option(help="Write a report with charts (.html or .png).")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON: an object for each policy and scale.")] = False,
    depth: Annotated[
        Depth,
        typer.Option(help="full: run whole clusters under random faults instead of a trace, and report violations."),
    ] = Depth.POLICY,
    calibration: Annotated[
        bool, typer.Option("--calibration", help="Show how closely the engine model matches measurements.")
    ] = False,
) -> None:
    """Replay a trace against a described cluster: the real routing, admission and scaling, on modelled engines."""
    from forebay.cli.simulate.calibration import calibration as show_calibration
    from forebay.cli.simulate.chaos import chaos, chaos_seeds
    from forebay.cli.simulate.plan import SimulationOptions, check_alone
    from forebay.cli.simulate.run import run

    options = SimulationOptions(
        file=file,
        trace=trace or "",
        model=model,
        speed=speed,
        policies=tuple(policy or ()),
        fleets=tuple(fleet or ()),
        replicas=replicas,
        assignments=tuple(set_ or ()),
        seed=seed,
        seeds=seeds,
        requests=requests,
        from_s=from_,
        until_s=until,
        scales=scale,
        jobs=jobs,
    )
    if calibration:
        check_alone("--calibration", options, report, takes=())
        raise typer.Exit(show_calibration(as_json))
    if depth is Depth.FULL:
        check_alone("--depth full", options, report, takes=("--seed", "--seeds"))
        raise typer.Exit(chaos(chaos_seeds(options), as_json=as_json))
    raise typer.Exit(run(options, report, as_json))
