"""Speech with real models through the unmodified clients of OpenAI and Triton: one transcribes the other."""

import ctypes
import io
import re
import wave
from collections.abc import Callable, Iterator
from difflib import SequenceMatcher
from importlib.util import find_spec
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import numpy as np
import openai
import pytest
import tritonclient.grpc
import tritonclient.http
from tests.e2e.tasks.served import Served, at_once, serving

FORMATS = ("mp3", "wav", "flac", "opus", "aac")
SAID = "Ever tried? Ever failed? No matter. Try again. Fail again. Fail better."
FOX = "The quick brown fox jumps over the lazy dog. How much wood would a woodchuck chuck?"
WHISPER, POLYGLOT, PIPER, VAD = "whisper-tiny-en", "whisper-base", "piper-en-joe", "voice-activity"
FRAME = 512


@pytest.fixture(scope="module")
def speech(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    if not all(find_spec(name) for name in ("faster_whisper", "espeakng_loader")):
        pytest.skip("needs the extra 'audio'")
    with serving(Path(tmp_path_factory.mktemp("speech")), (WHISPER, POLYGLOT, PIPER, VAD)) as served:
        yield served


@pytest.fixture
def talk(speech: Served) -> Iterator[openai.OpenAI]:
    with speech.openai() as client:
        yield client


def words(text: str) -> list[str]:
    """The words of a text."""
    return re.findall(r"[a-z0-9']+", text.lower())


def understood(text: str, said: str = SAID) -> bool:
    """Whether a text is what was spoken: Piper varies its voice, so that a word in four may be heard as another."""
    return SequenceMatcher(None, words(text), words(said), autojunk=False).ratio() > 0.7


def say(client: openai.OpenAI, text: str = SAID, **more: Any) -> bytes:
    """A file with the text spoken."""
    content: bytes = client.audio.speech.create(model=PIPER, voice="joe", input=text, **more).read()
    return content


def hear(client: openai.OpenAI, file: bytes, **more: Any) -> Any:
    """What Whisper makes of a file."""
    return client.audio.transcriptions.create(model=WHISPER, file=("speech", file), **more)


def wav(pcm: bytes, rate_hz: int) -> bytes:
    """A WAV file."""
    file = io.BytesIO()
    with wave.open(file, "wb") as out:
        out.setparams((1, 2, rate_hz, 0, "NONE", ""))
        out.writeframes(pcm)
    return file.getvalue()


def silent(seconds: int) -> bytes:
    """A WAV file in which nobody speaks."""
    return wav(bytes(32_000 * seconds), 16_000)


@pytest.mark.parametrize("format", FORMATS)
def test_speech_in_every_format_is_transcribed_back(talk: openai.OpenAI, format: str) -> None:
    assert understood(hear(talk, say(talk, response_format=format)).text)


def test_pcm_speech_has_the_format_of_openai(talk: openai.OpenAI) -> None:
    assert understood(hear(talk, wav(say(talk, response_format="pcm"), 24_000)).text)


def test_speech_streams_by_sentence_and_speed_shortens_it(talk: openai.OpenAI) -> None:
    slow, fast = len(say(talk, response_format="pcm", speed=0.8)), len(say(talk, response_format="pcm", speed=1.6))
    assert fast < 0.7 * slow
    with talk.audio.speech.with_streaming_response.create(
        model=PIPER, voice="alloy", input=SAID, response_format="wav"
    ) as answer:
        assert answer.headers["transfer-encoding"] == "chunked"
        assert len(list(answer.iter_bytes())) > 1


def test_transcript_has_timestamps_words_and_subtitles(talk: openai.OpenAI) -> None:
    file = say(talk, FOX)
    found = hear(talk, file, response_format="verbose_json", timestamp_granularities=["word", "segment"])
    heard = words(found.text)
    assert understood(found.text, FOX)
    assert found.language == "english"
    assert found.segments[0].start < found.segments[-1].end <= found.duration + 1
    assert words(" ".join(each.word for each in found.words)) == heard
    assert all(each.start <= each.end for each in found.words)
    titles = hear(talk, file, response_format="srt")
    number, time, text = titles.split("\n")[:3]
    assert number == "1"
    assert re.fullmatch(r"00:00:0\d,\d{3} --> 00:00:\d\d,\d{3}", time)
    assert words(text) == heard[: len(words(text))]
    assert hear(talk, file, response_format="vtt").startswith("WEBVTT\n\n00:00:0")
    assert words(hear(talk, file, response_format="text")) == heard


def test_transcript_can_be_streamed(talk: openai.OpenAI) -> None:
    events = list(hear(talk, say(talk), stream=True))
    assert [each.type for each in events[:-1]] == ["transcript.text.delta"] * (len(events) - 1)
    assert events[-1].type == "transcript.text.done"
    assert "".join(each.delta for each in events[:-1]) == events[-1].text
    assert understood(events[-1].text)


def german(text: str) -> bytes:
    """A WAV file of a machine that speaks German."""
    loader = pytest.importorskip("espeakng_loader")
    speaker = ctypes.CDLL(loader.get_library_path())
    rate_hz = speaker.espeak_Initialize(2, 0, loader.get_data_path().encode(), 0x8000)
    pcm = bytearray()

    @ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p, ctypes.c_int, ctypes.c_void_p)
    def take(samples: int | None, count: int, _: int | None) -> int:
        pcm.extend(ctypes.string_at(samples, 2 * count) if samples else b"")
        return 0

    speaker.espeak_SetSynthCallback(take)
    speaker.espeak_SetVoiceByName(b"de")
    data = text.encode()
    speaker.espeak_Synth(data, len(data) + 1, 0, 0, 0, 1, None, None)
    return wav(bytes(pcm), rate_hz)


@pytest.mark.filterwarnings("ignore:deprecated")
def test_german_speech_is_transcribed_and_translated(talk: openai.OpenAI) -> None:
    file = ("german.wav", german("Guten Morgen, meine Damen und Herren. Der Zug nach München fährt heute nicht."))
    written = talk.audio.transcriptions.create(model=POLYGLOT, file=file, response_format="verbose_json")
    assert (written.language, words(written.text)[:2]) == ("german", ["guten", "morgen"])
    translated: Any = talk.audio.translations.create(model=POLYGLOT, file=file, response_format="verbose_json")
    assert (translated.language, words(translated.text)[:2]) == ("english", ["good", "morning"])


def test_the_error_about_a_language_names_all_that_the_model_knows(talk: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError, match=r"'DE' is not known .* knows af, .*\bde\b.*\bzh\b"):
        talk.audio.transcriptions.create(model=POLYGLOT, file=("a.wav", silent(1)), language="DE")


Asking = Callable[[openai.OpenAI], object]


@pytest.mark.parametrize(
    ("asking", "param"),
    [
        (lambda c: hear(c, b"\xff\xfbnot music" * 500), "file"),
        (lambda c: hear(c, b"#EXTM3U\n#EXTINF:10,\nfile:///etc/passwd\n"), "file"),
        (lambda c: hear(c, silent(1801)), "file"),
        (lambda c: hear(c, silent(1), language="de"), "language"),
        (lambda c: c.audio.translations.create(model=WHISPER, file=("a.wav", silent(1))), "model"),
        (lambda c: c.audio.transcriptions.create(model=PIPER, file=("a.wav", silent(1))), "model"),
        (lambda c: say(c, "…"), "input"),
        (lambda c: c.audio.speech.create(model=PIPER, voice="bob", input="Hi."), "voice"),
    ],
)
@pytest.mark.filterwarnings("ignore:deprecated")
def test_unsupported_audio_parameter_is_rejected_by_name(talk: openai.OpenAI, asking: Asking, param: str) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        asking(talk)
    assert caught.value.param == param


def test_eight_concurrent_transcriptions_equal_a_single_one(talk: openai.OpenAI) -> None:
    file = say(talk)
    alone = hear(talk, file).text
    assert set(at_once(lambda _: hear(talk, file).text)) == {alone}


def asked(name: str, value: bytes) -> Any:
    """An input of one BYTES element, for gRPC."""
    tensor = tritonclient.grpc.InferInput(name, [1], "BYTES")
    tensor.set_data_from_numpy(np.array([value], object))
    return tensor


def streamed(served: Served, model: str, tensor: Any, parameters: dict[str, Any]) -> list[Any]:
    """All responses of a decoupled model."""
    coming: SimpleQueue[Any] = SimpleQueue()
    found = []
    with tritonclient.grpc.InferenceServerClient(f"127.0.0.1:{served.grpc_port}") as client:
        client.start_stream(lambda result, error: coming.put(error or result))
        client.async_stream_infer(model, [tensor], parameters=parameters, enable_empty_final_response=True)
        while True:
            result = coming.get(timeout=60)
            if isinstance(result, Exception):
                raise result
            if result.get_response().outputs:
                found.append(result)
            if result.get_response().parameters["triton_final_response"].bool_param:
                return found


def test_speech_models_answer_the_inference_protocol(speech: Served) -> None:
    pieces = streamed(speech, PIPER, asked("TEXT", SAID.encode()), {"format": "flac"})
    assert len(pieces) > 1
    file = b"".join(piece.as_numpy("AUDIO")[0] for piece in pieces)
    assert file[:4] == b"fLaC"
    segments = streamed(speech, WHISPER, asked("AUDIO", file), {"language": "en"})
    text = b"".join(each for segment in segments for each in segment.as_numpy("TEXT")).decode()
    assert understood(text)
    with pytest.raises(tritonclient.utils.InferenceServerException, match="file: not audio"):
        streamed(speech, WHISPER, asked("AUDIO", b"noise"), {})


@pytest.mark.parametrize(
    ("model", "option", "value"),
    [
        (WHISPER, "temperature", "hot"),
        (WHISPER, "temperature", "7"),
        (WHISPER, "prompt", 7),
        (PIPER, "speed", "fast"),
    ],
)
def test_unusable_option_is_refused_over_the_inference_protocol(
    speech: Served, model: str, option: str, value: str | int
) -> None:
    tensor = asked("AUDIO", silent(1)) if model == WHISPER else asked("TEXT", b"Hi.")
    with pytest.raises(tritonclient.utils.InferenceServerException, match=f"^.*{option}: '?{value}'? is not "):
        streamed(speech, model, tensor, {option: value})


def activity(served: Served, samples: np.ndarray[Any, Any], stream: int) -> np.ndarray[Any, Any]:
    """How likely somebody speaks in each frame of a stream, which is a sequence."""
    frames = samples[: samples.size // FRAME * FRAME].reshape(-1, 1, FRAME)
    found = []
    with tritonclient.http.InferenceServerClient(f"127.0.0.1:{served.http_port}") as client:
        for at, frame in enumerate(frames):
            tensor = tritonclient.http.InferInput("AUDIO", [1, FRAME], "FP32")
            tensor.set_data_from_numpy(frame)
            answer = client.infer(
                VAD,
                [tensor],
                sequence_id=stream,
                sequence_start=at == 0,
                sequence_end=at == len(frames) - 1,
            )
            found.append(answer.as_numpy("SPEECH").item())
    return np.array(found)


def test_voice_activity_state_is_kept_per_stream(speech: Served, talk: openai.OpenAI) -> None:
    pcm = np.frombuffer(say(talk, response_format="pcm"), "<i2").astype(np.float32) / 32768
    at = np.arange(0, pcm.size, 1.5)  # 24 kHz to 16 kHz
    voice = np.interp(at, np.arange(pcm.size), pcm).astype(np.float32)
    quiet = np.zeros(FRAME * 60, np.float32)
    alone = activity(speech, voice, 1)
    assert alone.mean() > 0.5
    assert activity(speech, quiet, 2).max() < 0.05
    for n, found in enumerate(at_once(lambda n: activity(speech, voice if n % 2 else quiet, 10 + n))):
        np.testing.assert_allclose(found, alone if n % 2 else activity(speech, quiet, 20), atol=1e-4)
