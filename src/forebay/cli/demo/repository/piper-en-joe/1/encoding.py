"""Samples as files of the usual formats, piece by piece, with FFmpeg behind PyAV; WAV needs nothing."""

import io
import struct

import av

ENCODERS = {
    "flac": ("flac", "flac", 0, 0),
    "mp3": ("mp3", "libmp3lame", 0, 64_000),
    "opus": ("ogg", "libopus", 48_000, 48_000),
    "aac": ("adts", "aac", 0, 64_000),
    "pcm": ("s16le", "pcm_s16le", 24_000, 0),
}
"""Format → FFmpeg's container and codec; samples a second (0: those of the voice) and bits a second (0: no choice).

PCM says nothing of its rate, so it has the one that clients of OpenAI's API expect.
"""
FORMATS = ("wav", *ENCODERS)
UNKNOWN_BYTES = 0xFFFFFFFF
"""What a WAV file says of its length while nobody knows it; players read to the end."""


class Wav:
    """16 bits, one channel."""

    def __init__(self, rate_hz):
        self._head = wav_head(rate_hz)

    def add(self, samples):
        """The bytes for more samples."""
        head, self._head = self._head, b""
        return head + samples.astype("<i2").tobytes()

    def end(self):
        """The last bytes."""
        return self._head


class Coded:
    """What FFmpeg makes of the samples."""

    def __init__(self, format, rate_hz):
        container, codec, coded_hz, bits_per_s = ENCODERS[format]
        self._rate_hz = rate_hz
        self._pipe = _Pipe()
        self._file = av.open(self._pipe, "w", format=container)
        self._stream = self._file.add_stream(codec, rate=coded_hz or rate_hz, layout="mono")
        if bits_per_s:
            self._stream.bit_rate = bits_per_s

    def add(self, samples):
        """The bytes for more samples; those of the last ones may come later."""
        frame = av.AudioFrame.from_ndarray(samples.reshape(1, -1), "s16", "mono")
        frame.sample_rate = self._rate_hz
        self._file.mux(self._stream.encode(frame))
        return self._pipe.taken()

    def end(self):
        """The last bytes."""
        self._file.mux(self._stream.encode(None))
        self._file.close()
        return self._pipe.taken()


class _Pipe(io.RawIOBase):
    """Keeps what is written until it is taken. Nothing can go back in it, as in a stream."""

    def __init__(self):
        self._data = bytearray()

    def writable(self):
        return True

    def write(self, data):
        self._data += data
        return len(data)

    def taken(self):
        data, self._data = bytes(self._data), bytearray()
        return data


def encoder(format, rate_hz):
    """For one file of samples of 16 bits."""
    return Wav(rate_hz) if format == "wav" else Coded(format, rate_hz)


def wav_head(rate_hz):
    """The 44 bytes before the samples."""
    form = struct.pack("<4sIHHIIHH", b"fmt ", 16, 1, 1, rate_hz, 2 * rate_hz, 2, 16)
    return b"".join(
        (struct.pack("<4sI4s", b"RIFF", UNKNOWN_BYTES, b"WAVE"), form, struct.pack("<4sI", b"data", UNKNOWN_BYTES))
    )
