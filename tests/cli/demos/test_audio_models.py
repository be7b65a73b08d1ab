"""Speech models of the demo without weights: decoding and encoding of audio files, text to phonemes."""

import io
import struct
import sys
import tracemalloc
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest

import forebay.cli.demo

MODELS = Path(next(iter(forebay.cli.demo.__path__))) / "repository"
RATE_HZ = 22_050


def imported(model: str, name: str, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """A file of a model, as the model imports it."""
    monkeypatch.syspath_prepend(str(MODELS / model / "1"))
    sys.modules.pop(name, None)
    return import_module(name)


@pytest.fixture
def audio(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """How Whisper reads files."""
    pytest.importorskip("av")
    return imported("whisper-tiny-en", "audio", monkeypatch)


@pytest.fixture
def encoding(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """How Piper writes files."""
    pytest.importorskip("av")
    return imported("piper-en-joe", "encoding", monkeypatch)


@pytest.fixture
def phonemes(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """espeak-ng."""
    pytest.importorskip("espeakng_loader")
    return imported("piper-en-joe", "phonemes", monkeypatch).Phonemizer("en-us")


def tone(seconds: float) -> np.ndarray[Any, Any]:
    """A tone of 440 Hz, half as loud as can be."""
    at = np.arange(int(seconds * RATE_HZ)) / RATE_HZ
    return (np.sin(2 * np.pi * 440 * at) * 16384).astype(np.int16)


def coded(encoding: ModuleType, format: str, pieces: list[np.ndarray[Any, Any]]) -> bytes:
    """A file of these pieces."""
    file = encoding.encoder(format, RATE_HZ)
    return b"".join([*(file.add(piece) for piece in pieces), file.end()])


@pytest.mark.parametrize("format", ["wav", "flac", "mp3", "opus", "aac"])
def test_audio_encoded_in_pieces_decodes_again(audio: ModuleType, encoding: ModuleType, format: str) -> None:
    samples = audio.decode(coded(encoding, format, [tone(0.7), tone(0.5), tone(0.3)]), 60)
    assert samples.dtype == np.float32
    assert 1.4 < samples.size / audio.RATE_HZ < 1.7
    loudness = np.sqrt(np.mean(samples[2000:20_000] ** 2))
    assert 0.3 < loudness < 0.4


@pytest.mark.parametrize("samples", [2_000, 200_000])
def test_audio_of_a_very_low_sample_rate_is_measured_before_it_is_resampled(audio: ModuleType, samples: int) -> None:
    file = io.BytesIO()
    with audio.av.open(file, "w", format="matroska") as out:
        stream = out.add_stream("pcm_u8", rate=1, layout="mono")
        frame = audio.av.AudioFrame.from_ndarray(np.zeros((1, samples), np.uint8), "u8", "mono")
        frame.sample_rate = 1
        out.mux([*stream.encode(frame), *stream.encode(None)])
    tracemalloc.start()
    try:
        with pytest.raises(audio.AudioError, match="longer than 60 s"):
            audio.decode(file.getvalue(), 60)
        assert tracemalloc.get_traced_memory()[1] < 10 * 2**20
    finally:
        tracemalloc.stop()


def test_pcm_has_the_rate_that_clients_expect(encoding: ModuleType) -> None:
    assert abs(len(coded(encoding, "pcm", [tone(0.5), tone(0.5)])) / 2 - 24_000) < 100


def test_streamed_wav_header_marks_the_length_as_unknown(encoding: ModuleType) -> None:
    file = coded(encoding, "wav", [tone(0.1)])
    riff, size, kind = struct.unpack_from("<4sI4s", file)
    assert (riff, size, kind, file[36:40]) == (b"RIFF", 0xFFFFFFFF, b"WAVE", b"data")
    assert struct.unpack_from("<HHI", file, 20) == (1, 1, RATE_HZ)
    assert len(file) == 44 + 2 * int(0.1 * RATE_HZ)
    assert coded(encoding, "wav", []) == file[:44]


@pytest.mark.parametrize(
    "file",
    [
        b"",
        b"RIFF",
        b"\0" * 10_000,
        b"ffconcat version 1.0\nfile /etc/passwd\n",
        b"#EXTM3U\n#EXT-X-TARGETDURATION:10\n#EXTINF:10,\nfile:///etc/passwd\n#EXT-X-ENDLIST\n",
        b'<?xml version="1.0"?><MPD xmlns="urn:mpeg:dash:schema:mpd:2011"></MPD>',
    ],
)
def test_non_audio_and_playlists_are_rejected(audio: ModuleType, file: bytes) -> None:
    with pytest.raises(audio.AudioError, match="not audio"):
        audio.decode(file, 60)


def test_file_in_another_format_is_rejected_with_those_that_are_known(audio: ModuleType) -> None:
    file = io.BytesIO()
    with audio.av.open(file, "w", format="aiff") as out:
        stream = out.add_stream("pcm_s16be", rate=RATE_HZ, layout="mono")
        frame = audio.av.AudioFrame.from_ndarray(tone(0.1).reshape(1, -1), "s16", "mono")
        frame.sample_rate = RATE_HZ
        out.mux([*stream.encode(frame), *stream.encode(None)])
    with pytest.raises(audio.AudioError, match="known formats: wav, flac, mp3,"):
        audio.decode(file.getvalue(), 60)


def test_too_long_audio_is_rejected(audio: ModuleType, encoding: ModuleType) -> None:
    file = coded(encoding, "mp3", [tone(10)] * 3)
    assert audio.decode(file, 31).size > 29 * audio.RATE_HZ
    with pytest.raises(audio.AudioError, match="longer than 20 s"):
        audio.decode(file, 20)


def test_audio_of_one_sample_a_second_is_rejected_before_it_fills_memory(
    audio: ModuleType, encoding: ModuleType
) -> None:
    file = encoding.wav_head(1) + bytes(1 << 20)
    with pytest.raises(audio.AudioError, match="longer than"):
        audio.decode(file, 60)


def test_empty_audio_is_rejected(audio: ModuleType, encoding: ModuleType) -> None:
    with pytest.raises(audio.AudioError):
        audio.decode(coded(encoding, "wav", []), 60)


def test_damaged_audio_is_decoded_as_far_as_possible(audio: ModuleType, encoding: ModuleType) -> None:
    file = bytearray(coded(encoding, "mp3", [tone(2)] * 2))
    file[8000:8400] = b"\xff" * 400
    assert audio.decode(bytes(file), 60).size > 2 * audio.RATE_HZ


def mp3(samples: np.ndarray[Any, Any], rate_hz: int, layout: str) -> bytes:
    """An MP3 file of these samples, the same ones in each channel."""
    av = pytest.importorskip("av")
    channels = 2 if layout == "stereo" else 1
    data = io.BytesIO()
    with av.open(data, "w", format="mp3") as file:
        stream = file.add_stream("libmp3lame", rate=rate_hz, layout=layout)
        frame = av.AudioFrame.from_ndarray(samples.repeat(channels).reshape(1, -1), "s16", layout)
        frame.sample_rate = rate_hz
        file.mux(stream.encode(frame))
        file.mux(stream.encode(None))
    return data.getvalue()


def test_audio_that_changes_its_form_midway_is_decoded_to_the_end(audio: ModuleType) -> None:
    parts = [mp3(tone(1), RATE_HZ, "mono"), mp3(tone(1), 2 * RATE_HZ, "stereo"), mp3(tone(1), RATE_HZ, "mono")]

    samples = audio.decode(b"".join(parts), 60)

    assert 2.4 < samples.size / audio.RATE_HZ < 2.9  # the middle one lasts half as long
    for at_s in (0.5, 1.3, 2.1):
        piece = samples[int(at_s * audio.RATE_HZ) :][:2000]
        assert 0.3 < np.sqrt(np.mean(piece**2)) < 0.4


@pytest.mark.parametrize(
    ("text", "ends"),
    [
        ("No mark at the end", "d"),
        ("One. Two! Three?", ".!?"),
        ("Mr. Smith met Dr. No, e.g. here; then left.", "."),
        ('He said: "Stop!" (and left.) Fine…', "!.."),
        ("\0 zero\n\nand a new line", "n"),
        ("…!?", ""),
        ("", ""),
    ],
)
def test_text_is_split_into_sentences(phonemes: Any, text: str, ends: str) -> None:
    assert "".join(sentence[-1] for sentence in phonemes.sentences(text)) == ends


def test_punctuation_is_kept_and_long_sentences_are_split(phonemes: Any) -> None:
    (sentence,) = phonemes.sentences("Try again; fail better, then stop.")
    assert "".join(each for each in sentence if each in ";,.") == ";,."
    long = list(phonemes.sentences("word " * 800))
    assert len(long) > 5
    assert max(map(len, long)) <= 500


@pytest.mark.parametrize("text", ["한국어", "한국어 and नमस्ते, you see.", "नमस्ते (हिन्दी)"])
def test_marks_of_another_language_are_not_spoken(phonemes: Any, text: str) -> None:
    (sentence,) = phonemes.sentences(text)
    assert not set(sentence) & set("()-")
    assert len(sentence) > 5


def test_text_in_parentheses_is_spoken(phonemes: Any) -> None:
    (sentence,) = phonemes.sentences("Speak (en) in (the) park (ko).")
    assert len(sentence.split()) == 6
