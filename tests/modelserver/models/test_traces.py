"""Traces of ensembles and decoupled models: each step has a trace of its own with the ensemble's as its parent."""

import asyncio
import json
from pathlib import Path
from time import monotonic
from typing import Any

import pytest
from tests.modelserver.models.rig import (
    IO,
    LOG,
    SAME,
    PendingRequest,
    config,
    ensemble,
    numbers,
    serving,
    tensor,
    until,
    write,
)

from forebay.core.serving.values import InferRequest
from forebay.modelserver.telemetry.latencies import Latencies
from forebay.modelserver.telemetry.logs import LogSettings
from forebay.modelserver.telemetry.trace_files import TraceFiles
from forebay.modelserver.telemetry.tracing import TraceSettings, Tracing
from forebay.modelserver.telemetry.watch import ObservedModels


def test_ensemble_steps_are_traced_with_their_parent(tmp_path: Path) -> None:
    root = write(tmp_path / "r", "m", config(dims="1"), SAME)
    fails = "    def answer(self, request):\n        raise ValueError('no')\n"
    write(root, "broken", config(dims="1"), fails)
    form = f"max_batch_size: 8 {IO.format(dims='1')}"
    ensemble(root, "inner", [("m", {"IN": "IN"}, {"OUT": "x"}), ("m", {"IN": "x"}, {"OUT": "OUT"})], form)
    ensemble(root, "outer", [("inner", {"IN": "IN"}, {"OUT": "y"}), ("m", {"IN": "y"}, {"OUT": "OUT"})], form)
    ensemble(root, "half", [("m", {"IN": "IN"}, {"OUT": "z"}), ("broken", {"IN": "z"}, {"OUT": "OUT"})], form)
    file = tmp_path / "trace"

    async def main() -> None:
        async with serving(root, startup=("*",)) as server:
            files = TraceFiles(LOG)
            traces = TraceSettings(Tracing(("TIMESTAMPS", "TENSORS"), 1, file=str(file)), files.retire)
            models = ObservedModels(
                server.itself, traces=traces, files=files, logs=LogSettings(), log=LOG, latencies=Latencies()
            )
            for name in ("outer", "half"):
                asked = PendingRequest()
                models.infer(InferRequest(name, "", "7", (tensor("IN", [[1.5]]),)), asked.on_response)
                await asked.one()
            await files.flush(traces, last=True)

    asyncio.run(main())
    found = json.loads(file.read_bytes())
    heads = [each for each in found if "model_name" in each]
    assert [(each["model_name"], each["model_version"], each["request_id"]) for each in heads] == [
        (name, 1, "7") for name in ("outer", "inner", "m", "m", "m", "half", "m", "broken")
    ]
    assert [(each["id"], each.get("parent_id")) for each in heads] == [
        (1, None), (2, 1), (3, 2), (4, 2), (5, 1), (6, None), (7, 6), (8, 6),
    ]  # fmt: skip
    stamps: dict[int, dict[str, int]] = {
        each["id"]: {stamp["name"]: stamp["ns"] for stamp in each["timestamps"]}
        for each in found
        if "timestamps" in each
    }
    whole = ["REQUEST_START", "QUEUE_START", "REQUEST_END"]
    assert [list(stamps[number]) == whole for number in range(1, 9)] == [True, True, *[False] * 3, True, False, True]
    for each in heads:
        if "parent_id" in each:
            own, around = stamps[each["id"]], stamps[each["parent_id"]]
            assert around["REQUEST_START"] <= own["REQUEST_START"] <= own["REQUEST_END"] <= around["REQUEST_END"]
    shown: list[Any] = [(each["id"], each["tensor"]["data"]) for each in found if "tensor" in each]
    assert shown[:4] == [(1, "1.5"), (1, "1.5"), (2, "1.5"), (2, "1.5")]


WITHIN = """
    def execute(self, requests):
        for request in requests:
            self.send(request)

    def send(self, request):
        sender = request.get_response_sender()
        sender.send(give(get(request)))
        while not Path({gate!r}).exists():
            time.sleep(0.001)
        sender.send(flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)
"""
IN_A_THREAD = "import threading; threading.Thread(target=self.send, args=(request,)).start()"
AFTERWARDS = WITHIN.replace("self.send(request)", IN_A_THREAD, 1)


@pytest.mark.parametrize("source", [WITHIN, AFTERWARDS])
def test_decoupled_request_computes_from_its_execution_to_its_last_response(tmp_path: Path, source: str) -> None:
    decoupled = config("model_transaction_policy { decoupled: true }", dims="1")
    file, gate = tmp_path / "trace", tmp_path / "gate"
    root = write(tmp_path / "r", "m", decoupled, source.format(gate=str(gate)))
    latencies = Latencies(summaries=True)

    async def main() -> float:
        async with serving(root, startup=("*",)) as server:
            files = TraceFiles(LOG)
            traces = TraceSettings(Tracing(("TIMESTAMPS",), 1, file=str(file)), files.retire)
            models = ObservedModels(
                server.itself, traces=traces, files=files, logs=LogSettings(), log=LOG, latencies=latencies
            )
            asked, sent = PendingRequest(), monotonic()
            models.infer(InferRequest("m", "", "7", (tensor("IN", [[1.5]]),)), asked.on_response)
            await until("the first response", lambda: asked.responses)
            came = monotonic()
            await until("more time after it than before", lambda: monotonic() - came > came - sent)
            held_us = (monotonic() - came) * 1e6
            gate.touch()
            assert numbers(await asked.one()) == [[1.5]]
            await files.flush(traces, last=True)
            return held_us

    held_us = asyncio.run(main())
    phases = latencies.known["m", "1"].phases
    assert phases["compute_infer"].sum_us >= held_us
    assert phases["queue"].sum_us <= phases["request"].sum_us - held_us
    (stamped,) = [each["timestamps"] for each in json.loads(file.read_bytes()) if "timestamps" in each]
    assert [each["name"] for each in stamped] == [
        "REQUEST_START", "QUEUE_START", "COMPUTE_START", "COMPUTE_INPUT_END", "COMPUTE_OUTPUT_START", "COMPUTE_END",
        "REQUEST_END",
    ]  # fmt: skip
    times = [each["ns"] for each in stamped]
    assert times == sorted(times)
