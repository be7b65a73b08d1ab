"""Image tasks with real models: known answers over both APIs, unchanged under concurrency."""

import io
import struct
import zlib
from base64 import b64decode, b64encode
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
import tritonclient.http as over_http
from tests.e2e.cluster import TEST_HOME
from tests.e2e.tasks.served import Served, at_once, serving

from forebay.registry.sources import obtain, parse

Image = pytest.importorskip("PIL.Image", reason="needs the extra 'vision'")
ImageDraw = pytest.importorskip("PIL.ImageDraw")
ImageFont = pytest.importorskip("PIL.ImageFont")

MODELS = ("efficientnet-lite0", "ssd-mobilenet", "selfie-segmentation", "pp-ocr-v4")
PICTURES = "package:scikit-image==0.25.2/skimage/data/"
"""Its pictures of a cat, of coffee and of an astronaut are in the public domain."""
CROWDS = 5
"""So often several ask at once, until some of them have come at the same time on a machine that is busy."""
WORDS = ("Invoice No. 20391", "Total: $1,234.56", "Paris, 21 Nov 2026")


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    for module in ("cv2", "ai_edge_litert"):
        pytest.importorskip(module, reason="needs the extra 'vision'")
    with serving(Path(tmp_path_factory.mktemp("images")), MODELS) as served:
        yield served


def picture(name: str) -> bytes:
    return obtain(parse(PICTURES + name), TEST_HOME, lambda *_: None).read_bytes()


def invoice() -> Any:
    image = Image.new("RGB", (640, 360), "white")
    draw, font = ImageDraw.Draw(image), ImageFont.load_default(36)
    for row, words in enumerate(WORDS):
        draw.text((40, 40 + 90 * row), words, fill="black", font=font)
    return image


def file_of(image: Any, kind: str = "PNG", **options: Any) -> bytes:
    file = io.BytesIO()
    image.save(file, kind, **options)
    return file.getvalue()


def ask(served: Served, path: str, model: str, *files: bytes, **more: Any) -> Any:
    """What is said of each file."""
    images = [b64encode(file).decode() for file in files]
    return served.post(f"/v1/images/{path}", model=model, image=images, **more)["data"]


def classes(served: Served, *files: bytes) -> list[tuple[str, float]]:
    """The best class of each file, and its score."""
    answer = ask(served, "classifications", "efficientnet-lite0", *files)
    return [(each["labels"][0]["label"], each["labels"][0]["score"]) for each in answer]


def objects(served: Served, *files: bytes) -> list[list[str]]:
    """The labels of the objects on each file."""
    answer = ask(served, "detections", "ssd-mobilenet", *files)
    return [[each["label"] for each in one["objects"]] for one in answer]


def over_v2(served: Served, model: str, *files: bytes, batched: bool = True, classes: int = 0, output: str) -> Any:
    """An output, from the protocol's own client."""
    data = np.array([[file] for file in files] if batched else list(files), object)
    tensor = over_http.InferInput("IMAGE", list(data.shape), "BYTES")
    tensor.set_data_from_numpy(data)
    wanted = over_http.InferRequestedOutput(output, class_count=classes)
    with over_http.InferenceServerClient(f"127.0.0.1:{served.http_port}", network_timeout=120) as client:
        return client.infer(model, [tensor], outputs=[wanted]).as_numpy(output)


def test_images_are_classified(served: Served) -> None:
    cat, coffee = picture("chelsea.png"), picture("coffee.png")
    (first, sure), (second, surer) = classes(served, cat, coffee)
    assert (first, second) == ("Egyptian cat", "espresso")
    assert (sure, surer) == (pytest.approx(0.79, abs=0.05), pytest.approx(0.9, abs=0.05))
    found = over_v2(served, "efficientnet-lite0", cat, coffee, classes=1, output="SCORE")
    assert [row[0].decode().split(":")[1:] for row in found] == [["285", "Egyptian cat"], ["967", "espresso"]]


def test_objects_are_detected_at_their_positions(served: Served) -> None:
    answer = ask(served, "detections", "ssd-mobilenet", picture("chelsea.png"), picture("coffee.png"))
    assert [(each["width"], each["height"]) for each in answer] == [(451, 300), (600, 400)]
    ((cat,), coffee) = (each["objects"] for each in answer)
    assert (cat["label"], cat["score"]) == ("cat", pytest.approx(0.92, abs=0.04))
    assert [cat["box"][side] for side in ("xmin", "ymin", "xmax", "ymax")] == pytest.approx([8, 1, 406, 297], abs=12)
    assert [each["label"] for each in coffee] == ["cup", "bowl", "dining table"]
    labels = over_v2(served, "ssd-mobilenet", picture("coffee.png"), output="LABEL")
    assert labels.shape == (1, 100)
    assert labels[0, :3].tolist() == [b"cup", b"bowl", b"dining table"]


def test_segmentation_mask_has_the_image_size(served: Served) -> None:
    (answer,) = ask(served, "segmentations", "selfie-segmentation", picture("astronaut.png"))
    (segment,) = answer["segments"]
    assert (segment["label"], segment["area"]) == ("person", pytest.approx(0.545, abs=0.03))
    mask = Image.open(io.BytesIO(b64decode(segment["mask"])))
    assert (mask.format, mask.mode, mask.size) == ("PNG", "L", (512, 512))
    assert (np.asarray(mask) > 127).mean() == pytest.approx(segment["area"], abs=0.01)


def test_ocr_reads_rotated_pages(served: Served) -> None:
    page = invoice()
    turned = [page, page.rotate(180), page.rotate(8, expand=True, fillcolor="white"), page.rotate(-90, expand=True)]
    answer = ask(served, "ocr", "pp-ocr-v4", *map(file_of, turned))
    assert [sorted(each["text"].split("\n")) for each in answer] == [sorted(WORDS)] * 4
    assert answer[0]["text"] == "\n".join(WORDS)
    assert all(line["score"] > 0.9 for each in answer for line in each["lines"])
    (left, top), _, (right, bottom), _ = answer[0]["lines"][0]["box"]
    assert [left, top, right, bottom] == pytest.approx([42, 49, 331, 78], abs=10)
    text = over_v2(served, "pp-ocr-v4", file_of(page), batched=False, output="TEXT")
    assert text.tolist() == [each.encode() for each in WORDS]


def test_model_called_by_a_step_is_loaded_with_it(served: Served, tmp_path: Path) -> None:
    explicit = ("--model-control-mode", "explicit", "--load-model", "pp-ocr-v4")
    with serving(tmp_path, ["pp-ocr-v4"], *explicit) as alone:
        (answer,) = ask(alone, "ocr", "pp-ocr-v4", file_of(invoice()))
        assert answer["text"] == "\n".join(WORDS)


def test_ocr_reads_a_strip_that_is_far_longer_than_a_page(served: Served) -> None:
    strip = Image.new("RGB", (6000, 60), "white")
    font = ImageFont.load_default(36)
    for place, words in enumerate(WORDS * 3):
        ImageDraw.Draw(strip).text((40 + 660 * place, 10), words, fill="black", font=font)
    (across,), (down,) = (
        ask(served, "ocr", "pp-ocr-v4", file_of(each)) for each in (strip, strip.rotate(90, expand=True))
    )
    assert [across["text"].count(words) for words in WORDS] == [3] * len(WORDS)
    assert [down["text"].count(words) for words in WORDS] == [3] * len(WORDS)
    assert max(x for line in across["lines"] for x, _ in line["box"]) > 40 + 660 * 8


def test_ocr_of_an_empty_page_returns_no_lines(served: Served) -> None:
    (answer,) = ask(served, "ocr", "pp-ocr-v4", file_of(Image.new("L", (200, 100), 255)))
    assert (answer["text"], answer["lines"], answer["width"]) == ("", [], 200)


def test_every_ocr_step_has_its_own_statistics(served: Served) -> None:
    steps = [f"pp-ocr-v4-{step}" for step in ("page", "find", "lines", "side", "upright", "read", "text")]
    before = [sum(served.batches(step).values()) for step in steps]
    ask(served, "ocr", "pp-ocr-v4", file_of(invoice()))
    assert [sum(served.batches(step).values()) for step in steps] == [count + 1 for count in before]


def test_image_encodings_give_the_same_result(served: Served) -> None:
    cat = Image.open(io.BytesIO(picture("chelsea.png"))).convert("RGB")
    turned = Image.Exif()
    turned[0x0112] = 6  # to be seen as it is meant it has to be turned clockwise
    clear = Image.new("RGBA", (451, 300), (0, 0, 0, 0))
    clear.paste(cat, (0, 0))
    files = (
        file_of(cat, "JPEG", quality=95),
        file_of(cat.rotate(90, expand=True), "JPEG", quality=95, exif=turned),
        file_of(cat, "WEBP"),
        file_of(cat, "GIF"),
        file_of(cat, "BMP"),
        file_of(cat.convert("L")),
        file_of(clear, "PNG"),
        file_of(cat.convert("CMYK"), "TIFF"),
        file_of(cat.resize((4510, 3000)), "JPEG"),
    )
    answer = ask(served, "detections", "ssd-mobilenet", *files)
    assert [each["objects"][0]["label"] for each in answer] == ["cat"] * len(files)
    assert [(each["width"], each["height"]) for each in answer] == [(451, 300)] * 8 + [(4510, 3000)]


def bomb(width: int, height: int) -> bytes:
    """A small file of a large picture."""

    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    head = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    rows = zlib.compress(bytes(1_000_000), 9)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", head) + chunk(b"IDAT", rows) + chunk(b"IEND", b"")


@pytest.mark.parametrize("path", ["classifications", "detections", "segmentations", "ocr"])
def test_invalid_image_error_names_its_field(served: Served, path: str) -> None:
    model = dict(zip(("classifications", "detections", "segmentations", "ocr"), MODELS, strict=True))[path]
    for file, words in (
        (b"hello", "not an image"),
        (picture("chelsea.png")[:5000], "not an image"),
        (bomb(50_000, 50_000), "at most 40 megapixels"),
        (bomb(9_000, 9_000), "9000 x 9000 pixels; at most 40 megapixels"),
    ):
        fields = {"model": model, "image": b64encode(file).decode()}
        status, error = served.refused(f"/v1/images/{path}", **fields)
        assert (status, error["param"]) == (400, "image")
        assert words in error["message"]
    answer = httpx.post(
        f"{served.url}/v1/images/{path}", data={"model": model}, files={"image": invoice_file()}, timeout=120
    )
    assert answer.status_code == 200


def invoice_file() -> tuple[str, bytes]:
    return "invoice.png", file_of(invoice())


def test_concurrent_requests_equal_a_single_one(served: Served) -> None:
    files = [picture("chelsea.png"), picture("coffee.png"), picture("astronaut.png"), file_of(invoice())] * 2
    alone = [(classes(served, file), objects(served, file)) for file in files[:4]]
    together = at_once(lambda n: (classes(served, files[n]), objects(served, files[n])))
    for n, (found, things) in enumerate(together):
        ((label, score),), labels = alone[n % 4]
        assert (found, things) == ([(label, pytest.approx(score, abs=0.01))], labels)
    shares = over_v2(served, "efficientnet-lite0", files[0], output="SCORE")
    pages = at_once(lambda _: ask(served, "ocr", "pp-ocr-v4", files[3])[0]["text"])
    assert pages == ["\n".join(WORDS)] * len(pages)
    for _ in range(CROWDS):
        for found in at_once(lambda _: over_v2(served, "efficientnet-lite0", files[0], output="SCORE")):
            np.testing.assert_allclose(found, shares, atol=0.001)
        if max(served.batches("efficientnet-lite0-network")) > 1:
            return
    raise AssertionError("nobody has shared a batch")
