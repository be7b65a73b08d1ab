"""Piper voices on ONNX Runtime: sentences become chunks of an audio file."""

import json
import math
import os
import unicodedata
from pathlib import Path

import numpy as np
import onnxruntime
import triton_python_backend_utils as pb_utils

from .encoding import FORMATS, encoder
from .phonemes import Phonemizer

THREADS_MAX = 4
PAUSE_S = 0.2
"""Silence after each sentence, in seconds."""
PEAK = 0.9
"""Peak level of a sentence, relative to full scale. Voices differ much in loudness."""
PAD, BEGIN, END = "_", "^", "$"
SPEEDS = (0.25, 4.0)
TEXT_CHARS_MAX = 4096
OTHER_NAMES = (
    "alloy", "ash", "ballad", "cedar", "coral", "echo", "fable", "marin", "nova", "onyx", "sage", "shimmer", "verse",
)  # fmt: skip
"""OpenAI's voices. Clients that name one of them get this voice."""
FINAL = pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL


class TritonPythonModel:
    """Responds with chunks of a file, one per sentence if the model is decoupled."""

    def initialize(self, args):
        """Load the voice."""
        config = json.loads(args["model_config"])
        self.decoupled = pb_utils.using_decoupled_model_transaction_policy(config)
        folder = Path(args["model_repository"]) / args["model_version"]
        self.voice = json.loads((folder / "voice.onnx.json").read_text())
        self.ids = self.voice["phoneme_id_map"]
        self.rate_hz = self.voice["audio"]["sample_rate"]
        self.name = config["parameters"]["voice"]["string_value"]
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = min(THREADS_MAX, len(os.sched_getaffinity(0)))
        options.add_session_config_entry("session.intra_op.allow_spinning", "0")
        self.session = onnxruntime.InferenceSession(folder / "voice.onnx", options)
        self.phonemizer = Phonemizer(self.voice["espeak"]["voice"])

    def execute(self, requests):
        responses = [self.answer(request) for request in requests]
        return None if self.decoupled else responses

    def answer(self, request):
        """The last response to a request; earlier ones are sent."""
        sender = request.get_response_sender() if self.decoupled else None
        found = []
        try:
            for piece in self.speak(request):
                if request.is_cancelled():
                    break
                if sender is None:
                    found.append(piece)
                elif piece:
                    sender.send(response(piece))
            last = None if sender is not None else response(b"".join(found))
        except OptionError as error:
            refused = pb_utils.TritonError(str(error), pb_utils.TritonError.INVALID_ARG)
            last = pb_utils.InferenceResponse(error=refused)
        if sender is not None:
            sender.send(last, flags=FINAL)
        return last

    def speak(self, request):
        """The chunks of the file, generated lazily."""
        options = json.loads(request.parameters())
        format, speed = options.get("format", "wav"), number(options.get("speed", 1.0))
        if format not in FORMATS:
            raise OptionError(f"format: {format!r} is not one of {', '.join(FORMATS)}")
        if not SPEEDS[0] <= speed <= SPEEDS[1]:
            raise OptionError(f"speed: {options['speed']!r} is not between {SPEEDS[0]:g} and {SPEEDS[1]:g}")
        voice = options.get("voice", self.name)
        if voice != self.name and voice not in OTHER_NAMES:
            raise OptionError(f"voice: {voice!r} is not here; the voice is {self.name!r}")
        text = pb_utils.get_input_tensor_by_name(request, "TEXT").as_numpy().reshape(-1)[0].decode()
        if len(text) > TEXT_CHARS_MAX:
            raise OptionError(f"input: longer than {TEXT_CHARS_MAX} characters")
        file = encoder(format, self.rate_hz)
        silence = np.zeros(int(PAUSE_S * self.rate_hz), np.int16)
        spoken = False
        for phonemes in self.phonemizer.sentences(text):
            spoken = True
            yield file.add(np.concatenate([self.samples(phonemes, speed), silence]))
        if not spoken:
            raise OptionError("input: there is nothing in it that can be spoken")
        yield file.end()

    def samples(self, phonemes, speed):
        """16-bit samples of one sentence."""
        ids = [*self.ids[BEGIN], *self.ids[PAD]]
        for each in unicodedata.normalize("NFD", phonemes):
            if each in self.ids:  # others are sounds that the voice was not trained on
                ids += [*self.ids[each], *self.ids[PAD]]
        ids += self.ids[END]
        given = self.voice["inference"]
        scales = np.array([given["noise_scale"], given["length_scale"] / speed, given["noise_w"]], np.float32)
        inputs = {"input": np.array([ids]), "input_lengths": np.array([len(ids)]), "scales": scales}
        wave = self.session.run(None, inputs)[0].reshape(-1)
        peak = max(0.01, float(np.abs(wave).max()))
        return np.clip(wave * (PEAK * 32767 / peak), -32768, 32767).astype(np.int16)


def number(value):
    """The number in an option, which may be a text over gRPC; NaN, which is in no range, if there is none."""
    try:
        return float(value)
    except ValueError:
        return math.nan


def response(piece):
    """A chunk of the file."""
    return pb_utils.InferenceResponse([pb_utils.Tensor("AUDIO", np.array([piece], object))])


class OptionError(Exception):
    """A parameter of the request is not supported; the text begins with its name."""
