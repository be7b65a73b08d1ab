"""Records the oracle's answers: `python -m tests.e2e.triton.record [TEXT]`; needs `scripts/oracle`.

Every check runs twice; what differs between the two runs is not recorded, and such checks are named.
With TEXT, only checks that have it in their name are recorded anew."""

import asyncio
import json
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

from tests.e2e.cluster import REPO
from tests.e2e.triton import oracle

from forebay.cli.conformance import command, rpc, run
from forebay.cli.conformance.cases import all_checks
from forebay.cli.conformance.check import Json, Result, Verdict, differences
from forebay.cli.conformance.server import Server, client

RECORDING = REPO / "src/forebay/cli/conformance" / command.RECORDED


async def observed(
    asked: command.Selection, recorded: run.Recorded, on_result: Callable[[Result], None]
) -> dict[str, Json]:
    """What a server answers to the suite's own checks."""
    assert asked.grpc is not None
    async with client(asked.url) as http:
        server = Server(http, rpc.Rpc(asked.grpc), asked.metrics)
        checks = [each for each in all_checks() if asked.only in each.name]
        try:
            return await run.run(server, checks, recorded, on_result)
        finally:
            await server.rpc.close()


def recorded_once(only: str) -> dict[str, Json]:
    """The oracle's observations. It is started anew after a request that it has not answered."""
    with tempfile.TemporaryDirectory() as folder, oracle.running(Path(folder)) as triton:

        def heard(result: Result) -> None:
            if result.verdict is not Verdict.PASSED:
                print(f"{result.name}: {result.found}{result.note}", file=sys.stderr)
                if result.found.startswith("no answer"):
                    triton.restart()

        asked = command.Selection(triton.url, triton.grpc, triton.metrics, only=only)
        return asyncio.run(observed(asked, {}, heard))


def steady(first: dict[str, Json], second: dict[str, Json]) -> dict[str, Json]:
    """What both runs agree in but for the wording of texts; prints where they do not."""
    found = {}
    for name in sorted({*first, *second}):
        different = list(differences(first.get(name), second.get(name)))
        if all(wording for *_, wording in different):
            found[name] = first[name]
        for path, one, other, _ in different:
            print(f"{name}: {path}: {one!r} or {other!r}", file=sys.stderr)
    return found


if __name__ == "__main__":
    if missing := oracle.missing():
        sys.exit(f"The oracle is missing: {missing}")
    part = sys.argv[1] if len(sys.argv) > 1 else ""
    kept = command.recorded()["checks"] if part else {}
    kept = {name: seen for name, seen in kept.items() if part not in name}
    checks = {**kept, **steady(recorded_once(part), recorded_once(part))}
    document = {"server": "Triton 2.51.0 with its Python backend", "checks": checks}
    RECORDING.write_text(json.dumps(document, indent=1, sort_keys=True, ensure_ascii=False) + "\n")
