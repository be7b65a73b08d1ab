"""What traces may take: large tensors, and traces that wait for their file."""

import json
from pathlib import Path
from typing import Any

import pytest
from tests.modelserver.telemetry.test_observed import TimedModels, ask, infer_request, observed_models
from tests.net.rig import run

from forebay.core.serving.config import Datatype
from forebay.core.serving.values import InferRequest, InferResponse, Tensor
from forebay.modelserver.telemetry import trace_files
from forebay.modelserver.telemetry.traced import TRACED_BYTES_MAX, TRACED_TENSORS_MAX
from forebay.modelserver.telemetry.tracing import Tracing

pytestmark = pytest.mark.interpreted


def test_long_strings_are_traced_without_their_data(tmp_path: Path) -> None:
    async def main() -> None:
        path = tmp_path / "t"
        models, files, traces, _ = observed_models(TimedModels(), Tracing(("TENSORS",), rate=1, file=str(path)))
        for size in (TRACED_BYTES_MAX - 4, TRACED_BYTES_MAX - 3):
            data = size.to_bytes(4, "little") + b"a" * size
            await ask(models, InferRequest("echo", "", "", (Tensor("IN", Datatype.BYTES, (1,), data),)))
        await files.flush(traces, last=True)
        found = [each["tensor"] for each in json.loads(path.read_bytes()) if "tensor" in each]
        sizes = [len(each["data"]) for each in found if each["name"] == "IN"]
        assert sizes == [TRACED_BYTES_MAX - 4 + len('""'), 0]

    run(main())


def test_a_request_with_many_responses_has_the_first_tensors_in_its_trace(tmp_path: Path) -> None:
    async def main() -> None:
        path = tmp_path / "t"
        models, files, traces, _ = observed_models(TimedModels(), Tracing(("TENSORS",), rate=1, file=str(path)))
        ticket: Any = models.infer(infer_request("slow"), lambda *_: None)
        outputs = (Tensor("OUT", Datatype.FP32, (1,), bytes(4)),)
        for _ in range(TRACED_TENSORS_MAX + 5):
            ticket.call.respond(InferResponse("slow", "1", "", outputs), False)
        ticket.call.respond(None, True)
        await files.flush(traces, last=True)
        assert sum("tensor" in each for each in json.loads(path.read_bytes())) == TRACED_TENSORS_MAX

    run(main())


@pytest.mark.parametrize(("limit", "most"), [("WAITING_MAX", 3), ("WAITING_BYTES_MAX", 2000)])
def test_traces_that_wait_for_a_numbered_file_are_bounded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, limit: str, most: int
) -> None:
    monkeypatch.setattr(trace_files, limit, most)

    async def main() -> None:
        setting = Tracing(("TIMESTAMPS",), rate=1, log_frequency=1000, file=str(tmp_path / "t"))
        models, files, traces, _ = observed_models(TimedModels(), setting)
        for number in range(2):
            lost = files.lost
            for _ in range(20):
                await ask(models, infer_request())
            kept = traces.sampler("echo").traces
            assert 1 < len(kept) < 20
            assert files.lost - lost == 20 - len(kept)
            await files.flush(traces, last=False)
            written = [each for each in json.loads((tmp_path / f"t.{number}").read_bytes()) if "model_name" in each]
            assert len(written) == len(kept)

    run(main())


def test_a_numbered_file_of_more_traces_than_may_wait_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(trace_files, "WAITING_MAX", 2)

    async def main() -> None:
        setting = Tracing(("TIMESTAMPS",), rate=1, log_frequency=3, file=str(tmp_path / "t"))
        models, files, traces, _ = observed_models(TimedModels(), setting)
        for _ in range(3):
            await ask(models, infer_request())
        await files.flush(traces, last=False)
        assert ((tmp_path / "t.0").exists(), files.lost) == (True, 1)

    run(main())
