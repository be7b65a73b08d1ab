"""Whisper on CTranslate2, through faster-whisper: transcribes an audio file to text segments."""

import json
import math
import os
import time
from pathlib import Path

import numpy as np
import triton_python_backend_utils as pb_utils
from faster_whisper import WhisperModel

from .audio import RATE_HZ, AudioError, decode

THREADS_MAX = 4
"""More threads do not help a model of this size."""
TEMPERATURES = (0.0, 0.4, 0.8)
"""Temperatures tried in turn until the output looks like text."""
SILENT_S_MAX = 5.0
"""After this time without a segment an empty response signals progress."""
FINAL = pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL


class TritonPythonModel:
    """Responds with the segments, one response each if the model is decoupled."""

    def initialize(self, args):
        """Load the weights."""
        config = json.loads(args["model_config"])
        self.decoupled = pb_utils.using_decoupled_model_transaction_policy(config)
        self.seconds_max = float(config["parameters"]["audio_s_max"]["string_value"])
        folder = Path(args["model_repository"]) / args["model_version"] / "weights"
        threads = min(THREADS_MAX, len(os.sched_getaffinity(0)))
        self.model = Listener(str(folder), device="cpu", compute_type="int8", cpu_threads=threads)

    def execute(self, requests):
        responses = [self.answer(request) for request in requests]
        return None if self.decoupled else responses

    def answer(self, request):
        """The last response to a request; earlier ones are sent."""
        sender = request.get_response_sender() if self.decoupled else None
        self.model.on_window = Progress(sender)
        try:
            segments, about = self.listen(request)
            found = []
            for segment in segments:
                if request.is_cancelled():
                    break
                if sender is None:
                    found.append(segment)
                else:
                    sender.send(response([segment], about))
            last = response(found, about)
        except (AudioError, OptionError) as error:
            field = "file" if isinstance(error, AudioError) else error.field
            refused = pb_utils.TritonError(f"{field}: {error}", pb_utils.TritonError.INVALID_ARG)
            last = pb_utils.InferenceResponse(error=refused)
        if sender is not None:
            sender.send(last, flags=FINAL)
        return last

    def listen(self, request):
        """The segments, which are computed lazily, and what is known before them."""
        options = json.loads(request.parameters())
        language = options.get("language") or None
        if language is not None and language not in self.model.supported_languages:
            known = ", ".join(self.model.supported_languages)
            raise OptionError("language", f"{language!r} is not known to this model; it knows {known}")
        if options.get("translate") and not self.model.model.is_multilingual:
            raise OptionError("model", "this model knows English only, and there is nothing to translate")
        prompt, temperature = options.get("prompt", ""), number(options.get("temperature", 0))
        if not isinstance(prompt, str):
            raise OptionError("prompt", f"{prompt!r} is not a text")
        if not 0 <= temperature <= 1:
            raise OptionError("temperature", f"{options['temperature']!r} is not a number from 0 to 1")
        data = pb_utils.get_input_tensor_by_name(request, "AUDIO").as_numpy().reshape(-1)[0]
        samples = decode(data, self.seconds_max)
        segments, info = self.model.transcribe(
            samples,
            language=language,
            task="translate" if options.get("translate") else "transcribe",
            initial_prompt=prompt or None,
            temperature=temperature or TEMPERATURES,
            word_timestamps=bool(options.get("words")),
        )
        return segments, (info.language, samples.size / RATE_HZ)


class Listener(WhisperModel):
    """Reports each 30 s window when it begins."""

    def encode(self, features):
        """Whisper's encoder, which runs first for every window."""
        self.on_window()
        return super().encode(features)


class Progress:
    """Sends an empty response if nothing else was sent for a while, in speech or in silence."""

    def __init__(self, sender):
        self._sender = sender
        self._last = time.monotonic()

    def __call__(self):
        now = time.monotonic()
        if self._sender is not None and now - self._last > SILENT_S_MAX:
            self._sender.send(response([], ("", 0.0)))
            self._last = now


class OptionError(Exception):
    """A parameter of the request is not supported."""

    def __init__(self, field, text):
        super().__init__(text)
        self.field = field


def number(value):
    """The number in an option, which may be a text over gRPC; NaN, which is in no range, if there is none."""
    try:
        return float(value)
    except ValueError:
        return math.nan


def response(segments, about):
    """Segments as tensors. DETAILS is JSON: Whisper's statistics of each, and its words if requested."""
    language, duration_s = about
    return pb_utils.InferenceResponse(
        [
            pb_utils.Tensor("TEXT", np.array([each.text.encode() for each in segments], object)),
            pb_utils.Tensor("TIMES", np.array([(s.start, s.end) for s in segments], np.float32).reshape(-1, 2)),
            pb_utils.Tensor("DETAILS", np.array([json.dumps(details(each)).encode() for each in segments], object)),
            pb_utils.Tensor("LANGUAGE", np.array([language.encode()], object)),
            pb_utils.Tensor("DURATION", np.array([duration_s], np.float32)),
        ]
    )


def details(segment):
    """Everything but text and times, with the names of OpenAI's verbose responses."""
    found = {
        "seek": segment.seek,
        "tokens": segment.tokens,
        "temperature": segment.temperature,
        "avg_logprob": segment.avg_logprob,
        "compression_ratio": segment.compression_ratio,
        "no_speech_prob": segment.no_speech_prob,
    }
    if segment.words is not None:
        found["words"] = [
            {"word": each.word.strip(), "start": float(each.start), "end": float(each.end)} for each in segment.words
        ]
    return found
