"""Simulation output: wide and narrow tables, JSON, progress bars."""

import io
import json

import msgspec
import pytest
from rich.console import Console
from rich.progress import Progress
from tests.sim.report.made import CURVES, report_of, summary_of

from forebay.cli.simulate.plan import Run, SimulationOptions, plan
from forebay.cli.simulate.processes import ReplayProgress
from forebay.cli.simulate.view import Bars, document, view
from forebay.sim.report.figures import FIGURES, Result


def printed(width: int, seeds: int = 1) -> list[str]:
    console = Console(width=width, file=io.StringIO())
    with console.capture() as captured:
        console.print(view(report_of(seeds), width, ["and so on"]))
    return captured.get().splitlines()


def test_wide_table_has_a_row_per_policy() -> None:
    lines = printed(180)

    assert any(line.split()[:3] == ["cpr", "90.0%", "9.00"] for line in lines)
    assert any(line.startswith("policy  goodput") for line in lines)


def test_narrow_table_has_a_row_per_figure_and_loses_nothing() -> None:
    lines = printed(80)

    assert any(line.split() == ["policy", "cpr", "random"] for line in lines)
    assert any(line.split() == ["goodput", "90.0%", "60.0%"] for line in lines)
    assert "refused by random: cut_off 1, queue_timeout 7" in [line.strip() for line in lines]
    assert lines[-1].strip() == "and so on"
    assert not any("…" in line for line in lines)


def test_several_seeds_have_intervals_and_a_second_table() -> None:
    text = "\n".join(printed(180, seeds=2))

    assert "± 6.4%" in text
    assert "Less cpr, paired by seed" in text
    assert "-30.0 pp ± 0.0 pp" in text


def test_json_has_every_figure_by_name_and_null_for_unknown_ones() -> None:
    report = report_of()
    first, second = json.loads(msgspec.json.encode(document(report.rows, report.scope)))

    assert (first["policy"], second["policy"]) == ("cpr", "random")
    assert first["goodput"] == pytest.approx(0.9)
    assert {*FIGURES} - {*first} == {"cost"}
    assert first["half_width"]["goodput"] is None
    assert (first["compared_to"], first["difference"]) == (None, {})
    assert second["compared_to"] == "cpr"
    assert second["difference"]["goodput"] == {"mean": pytest.approx(-0.3), "half_width": None}
    assert second["refused_by_reason"] == {"cut_off": 1.0, "queue_timeout": 7.0}
    assert first["seeds"] == [0]


@pytest.mark.parametrize(("seeds", "left"), [(1, 2), (6, 1)])
def test_progress_has_a_bar_per_policy_or_one_for_many_runs(seeds: int, left: int) -> None:
    planned = plan(SimulationOptions(policies=("cpr", "p2c"), seeds=seeds))
    progress = Progress(console=Console(file=io.StringIO()))
    shown = Bars(planned, progress)
    for run in planned.runs:
        finish(shown, run)
    descriptions = [task.description for task in progress.tasks]

    assert len(descriptions) == left
    assert descriptions == (["cpr", "p2c"] if seeds == 1 else ["runs"])
    assert all(task.finished for task in progress.tasks)


def test_progress_bar_says_planning_until_the_replay_begins() -> None:
    planned = plan(SimulationOptions(fleets=("oracle", "forebay")))
    progress = Progress(console=Console(file=io.StringIO()))
    shown = Bars(planned, progress)
    for run in planned.runs:
        shown.update(ReplayProgress(run, 0, 100))
    assert [task.description for task in progress.tasks] == ["oracle: planning", "forebay"]
    for run in planned.runs:
        shown.update(ReplayProgress(run, 1, 100))
    assert [task.description for task in progress.tasks] == ["oracle", "forebay"]


def finish(shown: Bars, run: Run) -> None:
    shown.update(ReplayProgress(run, 0, 100))
    shown.update(ReplayProgress(run, 50, 100))
    shown.update(ReplayProgress(run, 100, 100, Result(run.policy, run.scale, run.seed, summary_of(0.9)), CURVES))
