"""`forebay simulate --depth full`: simulates clusters under faults, one per seed, and reports violations."""

from collections.abc import Sequence

import msgspec
from rich.progress import MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from forebay.cli.settings import INTERRUPTED, WRONG_USAGE, UserError, screen
from forebay.cli.simulate.plan import SEED_MAX, SimulationOptions
from forebay.gateway import gateway
from forebay.sim.full.chaos import Verdict
from forebay.sim.full.chaos import chaos as simulated

BROKEN = 1
SEEDS_MAX = 1_000_000


def chaos_seeds(options: SimulationOptions) -> range:
    """The seeds to run. Raises `UserError`."""
    problems = []
    if not str(gateway.__file__).endswith(".py"):
        problems.append(
            "--depth full watches the gateway from within, which it cannot in a wheel whose request path is "
            "compiled; run it with a plain installation: pip install . in a checkout, without FOREBAY_COMPILE"
        )
    if not 0 <= options.seed <= SEED_MAX:
        problems.append(f"--seed: found {options.seed}; allowed: 0 to {SEED_MAX}")
    if not 1 <= options.seeds <= SEEDS_MAX:
        problems.append(f"--seeds: found {options.seeds}; allowed: 1 to {SEEDS_MAX}")
    if problems:
        raise UserError("\n".join(problems), WRONG_USAGE)
    return range(options.seed, options.seed + options.seeds)


def chaos(seeds: Sequence[int], *, as_json: bool) -> int:
    """Run every seed. Of several, only violations are shown. Returns the exit code."""
    results, notes_to = screen(), screen(stderr=True)
    broken: list[Verdict] = []
    done = 0
    columns = (TextColumn("seed {task.fields[seed]}"), MofNCompleteColumn(), TimeRemainingColumn())
    try:
        with Progress(*columns, console=notes_to, transient=True, disable=not notes_to.is_terminal) as progress:
            task = progress.add_task("seeds", total=len(seeds), seed=seeds[0])
            for seed in seeds:
                progress.update(task, completed=done, seed=seed)
                verdict = simulated(seed)
                if not verdict.ok:
                    broken.append(verdict)
                if not as_json and (len(seeds) == 1 or not verdict.ok):
                    results.print("\n".join(verdict.lines), markup=False, highlight=False, soft_wrap=True)
                done += 1
    except KeyboardInterrupt:
        notes_to.print(f"stopped after {done} of {len(seeds)} seeds")
        return INTERRUPTED
    if as_json:
        document = {
            "seeds": len(seeds),
            "broken": [
                {"seed": each.seed, "violations": each.violations, "command": each.command} for each in broken
            ],
        }
        results.out(msgspec.json.encode(document).decode(), highlight=False)
    elif len(seeds) > 1:
        results.print(f"{len(seeds)} seeds, {len(broken)} with violations", highlight=False)
    return BROKEN if broken else 0
