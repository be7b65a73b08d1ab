"""`forebay simulate --depth full`: which seeds run, and how violations are reported."""

import json
from dataclasses import replace

import pytest
from tests.cli.conftest import Run

from forebay.cli.settings import INTERRUPTED, WRONG_USAGE, UserError
from forebay.cli.simulate import chaos as command
from forebay.cli.simulate.chaos import BROKEN, chaos, chaos_seeds
from forebay.cli.simulate.plan import SimulationOptions
from forebay.sim.full.chaos import Verdict
from forebay.sim.full.chaos import chaos as simulated

CALM = 0
"""A seed that takes little time."""


def test_seeds_follow_the_options() -> None:
    assert chaos_seeds(SimulationOptions(seed=3, seeds=2)) == range(3, 5)


@pytest.mark.parametrize(
    ("wish", "says"),
    [
        (SimulationOptions(seeds=0), "--seeds: found 0; allowed: 1 to 1000000"),
        (SimulationOptions(seeds=1_000_001), "--seeds: found 1000001"),
        (SimulationOptions(seed=-1), "--seed: found -1; allowed: 0 to"),
    ],
)
def test_invalid_seeds_are_rejected(wish: SimulationOptions, says: str) -> None:
    with pytest.raises(UserError, match=says) as caught:
        chaos_seeds(wish)
    assert caught.value.exit_code == WRONG_USAGE


def test_compiled_installation_is_told_that_it_cannot_do_this(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(command.gateway, "__file__", "gateway.cpython-311-x86_64-linux-gnu.so")

    with pytest.raises(UserError, match=r"--depth full watches .* compiled; run it with a plain installation"):
        chaos_seeds(SimulationOptions())


@pytest.fixture
def verdict() -> Verdict:
    return simulated(CALM)


def test_violation_is_reported_with_the_command_that_repeats_it(
    verdict: Verdict, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def broken_at_two(seed: int) -> Verdict:
        return replace_of(verdict, seed, ("1.5 s: a request ended twice",) if seed == 2 else ())

    monkeypatch.setattr(command, "simulated", broken_at_two)

    assert chaos(range(4), as_json=False) == BROKEN
    told = capsys.readouterr().out.splitlines()
    assert "VIOLATED at 1.5 s: a request ended twice" in told
    assert "replay: forebay simulate --seed 2 --depth full" in told
    assert told[-1] == "4 seeds, 1 with violations"
    assert chaos(range(4), as_json=True) == BROKEN
    (broken,) = json.loads(capsys.readouterr().out)["broken"]
    assert (broken["seed"], broken["command"]) == (2, "forebay simulate --seed 2 --depth full")


def test_an_interrupt_reports_how_many_seeds_are_done(
    verdict: Verdict, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupted_at_two(seed: int) -> Verdict:
        if seed == 2:
            raise KeyboardInterrupt
        return replace_of(verdict, seed)

    monkeypatch.setattr(command, "simulated", interrupted_at_two)

    assert chaos(range(4), as_json=False) == INTERRUPTED
    assert capsys.readouterr().err == "stopped after 2 of 4 seeds\n"


@pytest.mark.slow
def test_command_runs_a_seed_and_rejects_unused_options(run: Run) -> None:
    done, refused = (
        run("simulate", "--depth", "full", "--seed", str(CALM), *more) for more in ([], ["--policy", "p2c"])
    )

    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith(f"seed {CALM}: policy=")
    assert "all invariants held" in done.stdout
    assert refused.returncode == WRONG_USAGE
    assert "--depth full: cannot be combined with --policy" in refused.stderr


def replace_of(verdict: Verdict, seed: int, violations: tuple[str, ...] = ()) -> Verdict:
    """The verdict as if of another seed."""
    return replace(verdict, seed=seed, violations=violations)
