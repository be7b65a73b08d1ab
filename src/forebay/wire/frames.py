"""Frames on a byte stream: a four-byte big-endian length, then that many bytes of payload. Sans-IO."""

HEADER_BYTES = 4
FRAME_BYTES_MAX = 256 * 1024 * 1024
"""Largest payload: enough for a body of the largest allowed size, or a batch of the longest vectors."""


class FrameTooLarge(Exception):  # noqa: N818 - states the condition
    """A payload exceeds the limit; the stream cannot be read any further."""


def frame(payload: bytes, bytes_max: int = FRAME_BYTES_MAX) -> bytes:
    """The payload with its length prefix."""
    if len(payload) > bytes_max:
        raise FrameTooLarge(f"a frame of {len(payload)} bytes is over the limit of {bytes_max}")
    return len(payload).to_bytes(HEADER_BYTES, "big") + payload


class FrameReader:
    """Reassembles payloads from received bytes, split anywhere."""

    def __init__(self, bytes_max: int = FRAME_BYTES_MAX) -> None:
        self._bytes_max = bytes_max
        self._buffer = bytearray()

    def feed(self, data: bytes) -> list[bytes]:
        """The payloads that `data` completes. Raises `FrameTooLarge` as soon as a length exceeds the limit."""
        buffer = self._buffer
        if not buffer and int.from_bytes(data[:HEADER_BYTES], "big") == len(data) - HEADER_BYTES <= self._bytes_max:
            return [data[HEADER_BYTES:]]  # one whole frame, nearly always
        buffer += data
        payloads: list[bytes] = []
        start, have = 0, len(buffer)
        while have - start >= HEADER_BYTES:
            size = int.from_bytes(buffer[start : start + HEADER_BYTES], "big")
            if size > self._bytes_max:
                raise FrameTooLarge(f"a frame of {size} bytes is over the limit of {self._bytes_max}")
            end = start + HEADER_BYTES + size
            if end > have:
                break
            payloads.append(bytes(buffer[start + HEADER_BYTES : end]))
            start = end
        del buffer[:start]
        return payloads
