"""Sequences: requests with the same id go to one instance, in order, with control inputs."""

import asyncio
from collections.abc import Sequence
from typing import Any, Final

from forebay.cli.conformance.check import Check, Json
from forebay.cli.conformance.server import Server

Turn = tuple[Json, int, bool, bool]
"""Sequence id, value, start, end."""

TURNS: Final[dict[str, list[Turn]]] = {
    "one": [(7, 1, True, False), (7, 2, False, False), (7, 3, False, True)],
    "of one request": [(8, 5, True, True)],
    "two in turns": [(9, 1, True, False), (10, 10, True, False), (9, 1, False, True), (10, 10, False, True)],
    "without start": [(11, 1, False, False)],
    "after its end": [(12, 1, True, True), (12, 1, False, False)],
    "started twice": [(13, 1, True, False), (13, 2, True, False), (13, 3, False, True)],
    "without id": [(0, 1, True, True)],
    "of text id": [("order", 1, True, True)],
    "of empty text id": [("", 1, True, True)],
}


async def _turn(server: Server, model: str, turn: Turn) -> Json:
    sequence, value, start, end = turn
    body: dict[str, Any] = {
        "inputs": [{"name": "IN", "datatype": "INT32", "shape": [1, 1], "data": [value]}],
        "parameters": {"sequence_id": sequence, "sequence_start": start, "sequence_end": end},
    }
    return (await server.infer(model, body)).inferred()


def _turns(model: str, name: str, turns: Sequence[Turn]) -> Check:
    async def run(server: Server) -> Json:
        return [await _turn(server, model, turn) for turn in turns]

    return Check(f"sequences/{model} {name}", run, (model,))


def _idle(model: str) -> Check:
    async def run(server: Server) -> Json:
        """A sequence without requests for longer than 2 s has ended."""
        first = await _turn(server, model, (20, 1, True, False))
        await asyncio.sleep(3.5)
        return [first, await _turn(server, model, (20, 1, False, False))]

    return Check(f"sequences/{model} idle", run, (model,))


def _more_than_slots(model: str) -> Check:
    async def run(server: Server) -> Json:
        """More sequences than slots: waiting ones are served when one ends; all sums are right."""

        async def whole(sequence: int) -> Json:
            sums: list[Json] = []
            for number in range(3):
                answer = await _turn(server, model, (sequence, sequence, number == 0, number == 2))
                assert isinstance(answer, dict)
                sums.append(answer["outputs"][0]["data"][0] if "outputs" in answer else answer)
            return sums

        return list(await asyncio.gather(*(whole(30 + each) for each in range(6))))

    return Check(f"sequences/{model} more than slots", run, (model,))


async def _ended_by_order(server: Server) -> Json:
    """Model metadata does not show the control inputs: clients do not send them."""
    return (await server.get("/v2/models/direct")).seen()


def checks() -> list[Check]:
    """The same checks for both strategies."""
    both = ("direct", "oldest")
    return [
        *(_turns(model, name, turns) for model in both for name, turns in TURNS.items()),
        *(_idle(model) for model in both),
        *(_more_than_slots(model) for model in both),
        Check("sequences/metadata", _ended_by_order, ("direct",)),
    ]
