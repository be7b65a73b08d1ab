"""Encodes samples as audio files in chunks, with FFmpeg through PyAV; WAV needs no library."""

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
"""Format → FFmpeg's container and codec; sample rate (0: the voice's) and bit rate (0: not applicable)."""
FORMATS = ("wav", *ENCODERS)
UNKNOWN_BYTES = 0xFFFFFFFF
"""Length in a WAV header while it is unknown; players then read to the end."""


class Wav:
    """16 bits, one channel."""

    def __init__(self, rate_hz):
        self._head = wav_head(rate_hz)

    def add(self, samples):
        """Encode more samples."""
        head, self._head = self._head, b""
        return head + samples.astype("<i2").tobytes()

    def end(self):
        """The final bytes."""
        return self._head


class Coded:
    """Encoding by FFmpeg."""

    def __init__(self, format, rate_hz):
        container, codec, coded_hz, bits_per_s = ENCODERS[format]
        self._rate_hz = rate_hz
        self._pipe = _Pipe()
        self._file = av.open(self._pipe, "w", format=container)
        self._stream = self._file.add_stream(codec, rate=coded_hz or rate_hz, layout="mono")
        if bits_per_s:
            self._stream.bit_rate = bits_per_s

    def add(self, samples):
        """Encode more samples; the bytes of the last ones may follow later."""
        frame = av.AudioFrame.from_ndarray(samples.reshape(1, -1), "s16", "mono")
        frame.sample_rate = self._rate_hz
        self._file.mux(self._stream.encode(frame))
        return self._pipe.taken()

    def end(self):
        """The final bytes."""
        self._file.mux(self._stream.encode(None))
        self._file.close()
        return self._pipe.taken()


class _Pipe(io.RawIOBase):
    """A buffer of written bytes until they are taken. It cannot seek, like a stream."""

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
    """An encoder for one file of 16-bit samples."""
    return Wav(rate_hz) if format == "wav" else Coded(format, rate_hz)


def wav_head(rate_hz):
    """The 44-byte WAV header."""
    form = struct.pack("<4sIHHIIHH", b"fmt ", 16, 1, 1, rate_hz, 2 * rate_hz, 2, 16)
    return b"".join(
        (struct.pack("<4sI4s", b"RIFF", UNKNOWN_BYTES, b"WAVE"), form, struct.pack("<4sI", b"data", UNKNOWN_BYTES))
    )
