"""The image task endpoints: bodies become files, tensors become responses."""

import asyncio
import contextlib
import gzip
from base64 import b64encode
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from functools import partial
from typing import Any

import httpx
import numpy as np
import pytest
import structlog
from hypothesis import given
from hypothesis import strategies as st
from tests.modelserver.openapi_check import answered
from tests.net.rig import run, serving

from forebay.core.errors import Refusal
from forebay.core.model import Limits
from forebay.core.serving.config import Datatype, ModelConfig, TensorSpec
from forebay.core.serving.errors import Kind, Refused
from forebay.core.serving.values import InferRequest, InferResponse, OnResponse, Tensor
from forebay.core.task_tensors import PARAMETER
from forebay.modelserver.ports import IndexEntry, ModelView
from forebay.modelserver.tasks.contract import Task
from forebay.modelserver.tasks.endpoint import TaskFront
from forebay.modelserver.tasks.images import classifications, detections, segmentations, texts
from forebay.modelserver.tasks.tensors import as_bytes, numbers, strings

TABLE = {
    f"/v1/images/{name}": task
    for name, task in {
        "classifications": classifications.TASK,
        "detections": detections.TASK,
        "segmentations": segmentations.TASK,
        "ocr": texts.TASK,
    }.items()
}
F32, I32 = Datatype.FP32, Datatype.INT32
Ask = Callable[..., Awaitable[httpx.Response]]
Look = Callable[[list[bytes]], Sequence[Tensor]]
"""What a model finds in the files of a request."""


class FakeTicket:
    """The ticket of a request in flight."""

    def cancel(self) -> None:
        """Has no effect."""


class FakeImageModels:
    """One model, which answers with `look`."""

    ready = True

    def __init__(self, task: Task, look: Look, max_batch: int, labels: Sequence[str]) -> None:
        outputs = tuple(TensorSpec(tensor.name, tensor.datatype, (-1,)) for tensor in look([b"x"]))
        self.config = ModelConfig(
            "m", "python", max_batch=max_batch, outputs=outputs, parameters={PARAMETER: task.name}
        )
        self.look = look
        self.names = labels
        self.seen: list[list[bytes]] = []
        self.shapes: list[tuple[int, ...]] = []

    def view(self, name: str, version: str) -> ModelView:
        return ModelView(self.config, {}, "1", ["1"])

    def labels(self, name: str, version: str, output: str) -> Sequence[str]:
        return self.names

    def index(self, ready_only: bool) -> Sequence[IndexEntry]:
        return [IndexEntry("m", "1", "READY")]

    def infer(self, request: InferRequest, on_response: OnResponse) -> FakeTicket:
        (image,) = request.inputs
        files = as_bytes(image)
        self.seen.append(files)
        self.shapes.append(image.shape)
        if b"bad" in files:
            raise Refused(Kind.INVALID_ARGUMENT, "image: not an image that can be read")
        tensors = tuple(self.look(files))
        if not self.config.max_batch:
            tensors = tuple(each.shaped(each.shape[1:]) for each in tensors)
        asyncio.get_running_loop().call_soon(on_response, InferResponse("m", "1", "", tensors), True)
        return FakeTicket()


def sizes(files: list[bytes]) -> Tensor:
    """As wide as the file has bytes, and 7 high."""
    return numbers("SIZE", I32, np.array([(len(each), 7) for each in files]))


def classes(files: list[bytes]) -> list[Tensor]:
    """The first byte says which of three classes it is."""
    scores = np.array([[0.8 if each[0] % 3 == n else 0.1 for n in range(3)] for each in files])
    return [numbers("SCORE", F32, scores), sizes(files)]


def objects(files: list[bytes]) -> list[Tensor]:
    """Three objects on each picture, and room for a fourth."""
    count = len(files)
    return [
        strings("LABEL", [b"cat", b"cup", b"bed", b""] * count, (count, 4)),
        numbers("SCORE", F32, np.array([[0.9, 0.6, 0.2, 0]] * count)),
        numbers("BOX", F32, np.array([[[1, 2, 3.456, 4]] * 4] * count)),
        sizes(files),
    ]


def masks(files: list[bytes]) -> list[Tensor]:
    """The mask is the file."""
    count = len(files)
    return [
        strings("LABEL", [b"person"] * count, (count, 1)),
        numbers("AREA", F32, np.full((count, 1), 0.25)),
        strings("MASK", files, (count, 1)),
    ]


def lines(files: list[bytes]) -> list[Tensor]:
    """Each word of the file is a line; the first is the surest."""
    words = files[0].split()
    scores = 1 / np.arange(1, len(words) + 1)
    return [
        strings("TEXT", words, (1, len(words))),
        numbers("SCORE", F32, scores.reshape(1, -1)),
        numbers("BOX", F32, np.zeros((1, len(words), 4, 2))),
        sizes(files),
    ]


LOOKS: dict[str, Look] = {"classifications": classes, "detections": objects, "segmentations": masks, "ocr": lines}


@contextlib.asynccontextmanager
async def gallery(
    path: str, max_batch: int = 2, labels: Sequence[str] = ()
) -> AsyncIterator[tuple[FakeImageModels, Ask]]:
    """The model behind one of the endpoints, and what asks that."""
    shelf = FakeImageModels(TABLE[f"/v1/images/{path}"], LOOKS[path], max_batch, labels)
    front = TaskFront(shelf, TABLE, structlog.get_logger())  # type: ignore[arg-type]  # it loads nothing
    async with (
        serving(front.handle, Limits(body_bytes_max=1 << 20)) as server,
        httpx.AsyncClient(base_url=f"http://127.0.0.1:{server.port}", event_hooks={"response": [answered]}) as client,
    ):
        yield shelf, partial(client.post, f"/v1/images/{path}")


def coded(data: bytes) -> str:
    return b64encode(data).decode()


def test_image_is_accepted_as_base64_data_url_or_file() -> None:
    async def main() -> None:
        async with gallery("classifications") as (shelf, ask):
            wrapped = coded(b"picture")[:5] + "\r\n" + coded(b"picture")[5:] + "\n"
            for image in (coded(b"picture"), "data:image/png;base64," + coded(b"picture"), wrapped):
                answer = await ask(json={"model": "m", "image": image, "top_k": 1})
                assert answer.status_code == 200
            form = {"model": "m", "top_k": "1"}
            answer = await ask(data=form, files={"image": ("a.png", b"picture")})
            assert (
                answer.json()
                == (await ask(data={**form, "image": coded(b"picture")}, files={"user": (None, "me")})).json()
            )
            assert shelf.seen == [[b"picture"]] * 5
            assert len(answer.json()["data"][0]["labels"]) == 1

    run(main())


def test_results_keep_the_order_of_images_across_batches() -> None:
    async def main() -> None:
        async with gallery("classifications", labels=["dog", "cat"]) as (shelf, ask):
            files = [coded(bytes([n] * (n + 1))) for n in range(5)]
            answer = (await ask(json={"model": "m", "image": files})).json()
            assert shelf.shapes == [(2, 1), (2, 1), (1, 1)]
            assert [(each["index"], each["width"], each["height"]) for each in answer["data"]] == [
                (n, n + 1, 7) for n in range(5)
            ]
            best = [each["labels"][0] for each in answer["data"]]
            assert best == [{"label": label, "score": 0.8} for label in ("dog", "cat", "2", "dog", "cat")]

    run(main())


def test_detections_respect_threshold_and_max_objects() -> None:
    async def main() -> None:
        async with gallery("detections") as (_, ask):
            body = {"model": "m", "image": [coded(b"ab"), coded(b"c")]}
            for more, labels in (
                ({}, ["cat", "cup"]),
                ({"threshold": 0}, ["cat", "cup", "bed"]),
                ({"threshold": 0.7}, ["cat"]),
                ({"threshold": 0, "max_objects": 2}, ["cat", "cup"]),
            ):
                answer = (await ask(json={**body, **more})).json()
                assert [[each["label"] for each in one["objects"]] for one in answer["data"]] == [labels] * 2
            first = answer["data"][0]
            assert first["objects"][0]["box"] == {"xmin": 1, "ymin": 2, "xmax": 3.46, "ymax": 4}
            assert (first["width"], first["height"]) == (2, 7)

    run(main())


def test_image_in_a_form_comes_once_and_not_compressed() -> None:
    async def main() -> None:
        async with gallery("classifications") as (shelf, ask):
            files = {"image": ("a.png", b"picture")}
            answer = await ask(data={"model": "m", "image": coded(b"picture")}, files=files)
            assert (answer.status_code, answer.json()["error"]["param"]) == (400, "image")
            assert "given several times" in answer.json()["error"]["message"]
            headers = {"content-type": "multipart/form-data; boundary=b", "content-encoding": "gzip"}
            answer = await ask(content=gzip.compress(b"--b--"), headers=headers)
            assert (answer.status_code, answer.json()["error"]["code"]) == (415, "unsupported_encoding")
            assert not shelf.seen

    run(main())


def test_segmentation_masks_are_base64() -> None:
    async def main() -> None:
        async with gallery("segmentations") as (_, ask):
            answer = (await ask(json={"model": "m", "image": [coded(b"one"), coded(b"two")]})).json()
            assert answer["data"] == [
                {"index": n, "segments": [{"label": "person", "area": 0.25, "mask": coded(file)}]}
                for n, file in enumerate((b"one", b"two"))
            ]

    run(main())


@pytest.mark.parametrize("max_batch", [0, 1])
def test_ocr_returns_lines_and_full_text(max_batch: int) -> None:
    async def main() -> None:
        async with gallery("ocr", max_batch) as (shelf, ask):
            files = [coded(each) for each in (b"two words", b" ", b"a b c")]
            answer = (await ask(json={"model": "m", "image": files, "threshold": 0.4})).json()
            assert [each["text"] for each in answer["data"]] == ["two\nwords", "", "a\nb"]
            assert answer["data"][0]["lines"][1] == {"text": "words", "score": 0.5, "box": [[0, 0]] * 4}
            assert shelf.shapes == [(1, 1) if max_batch else (1,)] * 3

    run(main())


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"image": "QQ=="}, "model"),
        ({"model": "m"}, "image"),
        ({"model": "m", "image": ""}, "image"),
        ({"model": "m", "image": []}, "image"),
        ({"model": "m", "image": ["QQ=="] * 65}, "image"),
        ({"model": "m", "image": ["QQ==", "?"]}, "image[1]"),
        ({"model": "m", "image": "data:image/png,abc"}, "image"),
        ({"model": "m", "image": "data:image/png;base64,"}, "image"),
        ({"model": "m", "image": "https://example.com/cat.png"}, "image"),
        ({"model": "m", "image": coded(b"bad")}, "image"),
        ({"model": "m", "image": "QQ==", "threshold": 2}, "threshold"),
        ({"model": "m", "image": "QQ==", "threshold": "x"}, "threshold"),
        ({"model": "m", "image": "QQ==", "colour": 1}, "colour"),
    ],
)
def test_invalid_field_is_named_in_the_error(body: dict[str, Any], param: str) -> None:
    async def main() -> None:
        async with gallery("detections") as (_, ask):
            answers = [await ask(json=body)]
            if not isinstance(body.get("image"), list) and body.get("image"):  # a form has one picture
                fields = {name: str(value) for name, value in body.items()}
                answers.append(await ask(data=fields, files={"user": (None, "me")}))
            for answer in answers:
                assert (answer.status_code, answer.json()["error"]["param"]) == (400, param)

    run(main())


@pytest.mark.parametrize(
    ("files", "param"),
    [
        ([("image", ("a.png", b""))], "image"),
        ([("picture", ("a.png", b"x"))], "picture"),
        ([("threshold", (None, "0.1")), ("threshold", (None, "0.2"))], "threshold"),
        ([("user", (None, "me"))], "image"),
    ],
)
def test_invalid_form_field_is_named_in_the_error(
    files: list[tuple[str, tuple[str | None, Any]]], param: str
) -> None:
    async def main() -> None:
        async with gallery("detections") as (_, ask):
            answer = await ask(files=[("model", (None, "m")), *files])
            assert (answer.status_code, answer.json()["error"]["param"]) == (400, param)

    run(main())


@given(
    st.sampled_from(sorted(TABLE)),
    st.binary(max_size=200),
    st.sampled_from([b"", b"multipart/form-data; boundary=b"]),
)
def test_arbitrary_body_is_parsed_or_rejected(path: str, body: bytes, content_type: bytes) -> None:
    for data in (body, b'{"model":"m","image":' + body + b"}", b'--b\r\ncontent-disposition: form-data; name="image"'
                 b'\r\n\r\n' + body + b"\r\n--b--\r\n"):  # fmt: skip
        try:
            job = TABLE[path].read(data, content_type)
        except Refusal:
            continue
        assert job.inputs(0, job.rows)[0].shape == (job.rows, 1)
