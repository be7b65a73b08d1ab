"""Decodes audio files of any usual format to samples, with FFmpeg through PyAV. Bounded; only the file is read."""

import io

import av
import numpy as np

RATE_HZ = 16_000
FORMATS = "aac,flac,matroska,webm,mov,mp4,m4a,3gp,3g2,mj2,mp3,ogg,wav"
"""Self-contained formats. FFmpeg's playlists would open any path or URL that they name."""
KNOWN = "wav, flac, mp3, ogg, opus, aac, m4a, mp4, webm"
"""What clients are told: of a file in another format, FFmpeg says no more than `Invalid argument`."""


class AudioError(Exception):
    """The file is not audio, or too long. The text is for the client."""


def decode(data: bytes, seconds_max: float) -> np.ndarray:
    """Mono samples at `RATE_HZ`, -1 to 1. Raises `AudioError`."""
    pieces = []
    count, count_max = 0, int(seconds_max * RATE_HZ)
    try:
        with av.open(io.BytesIO(data), options={"format_whitelist": FORMATS}, metadata_errors="ignore") as file:
            if not file.streams.audio:
                raise AudioError("there is no audio in it")
            for frame in _frames(file, seconds_max):
                samples = frame.to_ndarray()[0]
                count += samples.size
                if count > count_max:
                    raise AudioError(f"longer than {seconds_max:g} s")
                pieces.append(samples)
    except (av.FFmpegError, ValueError) as error:
        why = getattr(error, "strerror", None) or error
        raise AudioError(f"not audio that can be read ({why}); known formats: {KNOWN}") from error
    if not count:
        raise AudioError("there is no sound in it")
    samples = np.concatenate(pieces, dtype=np.float32)
    samples /= 32768.0
    return samples


def _frames(file, seconds_max):
    """The resampled frames. Damaged packets are skipped, as players do."""
    resampler, form = None, None
    for packet in file.demux(audio=0):
        try:
            frames = packet.decode()
        except av.InvalidDataError:
            continue
        for frame in frames:
            if frame.samples > seconds_max * frame.sample_rate:  # at 1 Hz, resampling makes gigabytes of 20 kB
                raise AudioError(f"longer than {seconds_max:g} s")
            frame.pts = None  # gaps and jumps of time stamps do not matter
            before, form = form, (frame.format.name, frame.layout.name, frame.sample_rate)
            if form != before:  # files that were joined change it midway; a resampler takes one form only
                if resampler is not None:
                    yield from resampler.resample(None)
                resampler = av.AudioResampler(format="s16", layout="mono", rate=RATE_HZ)
            yield from resampler.resample(frame)
    if resampler is not None:
        yield from resampler.resample(None)
