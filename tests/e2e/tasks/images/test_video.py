"""Video frames on one stream: frames that are too late to matter are dropped and reported as dropped."""

import io
from collections.abc import Iterator
from contextlib import closing, suppress
from pathlib import Path
from typing import Any

import grpc
import httpx
import numpy as np
import pytest
from tests.e2e.tasks.served import Served, serving
from tritonclient.grpc import service_pb2 as pb
from tritonclient.grpc import service_pb2_grpc
from tritonclient.utils import serialize_byte_tensor

Image = pytest.importorskip("PIL.Image", reason="needs the extra 'vision'")
ImageDraw = pytest.importorskip("PIL.ImageDraw")

MODEL = "ssd-mobilenet"
FRAMES = 60
WAITING_MAX = 2
ROUNDS = 10
GROWTH_MAX_KB = 48 * 1024
"""What the server may need more after that many videos; the frames of all are several times as large."""


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    with serving(Path(tmp_path_factory.mktemp("video")), [MODEL]) as served:
        yield served


def frame(number: int) -> bytes:
    """A ball that flies across a noisy sky, so that the file is large."""
    sky = np.random.default_rng(number).integers(160, 255, (270, 480, 3), np.uint8)
    image = Image.fromarray(sky)
    ImageDraw.Draw(image).ellipse((number * 7, 100, number * 7 + 50, 150), fill="orange")
    file = io.BytesIO()
    image.save(file, "JPEG", quality=95)
    return file.getvalue()


def request(number: int, data: bytes, waiting_max: int | None) -> pb.ModelInferRequest:
    message = pb.ModelInferRequest(model_name=MODEL, id=str(number))
    message.inputs.add(name="IMAGE", datatype="BYTES", shape=[1, 1])
    message.raw_input_contents.append(serialize_byte_tensor(np.array([data], object)).item())
    if waiting_max is not None:
        message.parameters["forebay_drop_oldest"].int64_param = waiting_max
    return message


def watch(served: Served, frames: list[bytes], waiting_max: int | None) -> list[tuple[str, str]]:
    """The id and error (empty: it was looked at) of each answer, in the order in which they came."""
    messages = (request(number, data, waiting_max) for number, data in enumerate(frames))
    with closing(grpc.insecure_channel(f"127.0.0.1:{served.grpc_port}")) as channel:
        stub: Any = service_pb2_grpc.GRPCInferenceServiceStub(channel)
        return [(each.infer_response.id, each.error_message) for each in stub.ModelStreamInfer(messages, timeout=120)]


def resident_kb(served: Served) -> int:
    """The memory of the server's own process."""
    mark = str(served.repository).encode()
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with suppress(OSError):  # other processes come and go
                if mark in (entry / "cmdline").read_bytes():
                    text = (entry / "status").read_text()
                    return int(text.split("VmRSS:")[1].split()[0])
    raise AssertionError("the server is gone")


def test_frames_are_answered_in_order_and_the_newest_is_never_dropped(served: Served) -> None:
    frames = [frame(number) for number in range(FRAMES)]
    answers = watch(served, frames, WAITING_MAX)
    (stats,) = httpx.get(f"{served.url}/v2/models/{MODEL}/stats").json()["model_stats"]
    assert [name for name, _ in answers] == [str(number) for number in range(FRAMES)]
    dropped = [int(name) for name, error in answers if error]
    assert dropped
    assert len(dropped) < FRAMES - WAITING_MAX
    assert set(range(FRAMES - WAITING_MAX, FRAMES)).isdisjoint(dropped)
    assert int(stats["inference_stats"]["fail"]["count"]) == len(dropped)
    assert all("dropped" in error for _, error in answers if error)


def test_no_frame_is_dropped_by_default(served: Served) -> None:
    frames = [frame(number) for number in range(FRAMES)]
    assert watch(served, frames, None) == [(str(number), "") for number in range(FRAMES)]


def test_finished_videos_leave_no_memory_behind(served: Served) -> None:
    frames = [frame(number) for number in range(FRAMES)]
    watch(served, frames, WAITING_MAX)
    before = resident_kb(served)
    for _ in range(ROUNDS):
        watch(served, frames, WAITING_MAX)
    assert sum(map(len, frames)) * ROUNDS > GROWTH_MAX_KB * 1024
    assert resident_kb(served) - before < GROWTH_MAX_KB
