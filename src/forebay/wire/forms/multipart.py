"""Parses `multipart/form-data` (RFC 7578): uploaded files and other fields.

The parser is python-multipart's, which searches for the boundary instead of walking over every byte; the limits and
the checks of parts are ours.
"""

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final, NamedTuple

from python_multipart.exceptions import FormParserError
from python_multipart.multipart import MultipartParser, parse_options_header

from forebay.core.errors import Code, Refusal

MEDIA_TYPE: Final = b"multipart/form-data"
PARTS_MAX: Final = 64
"""Fields and files of one form; OpenAI's largest form has twelve, one of which is a list."""
FIELD_BYTES_MAX: Final = 64 * 1024
"""Of the text of one field. Files are bounded by the size of the body."""
NAME_BYTES_MAX: Final = 256
"""Of the name of a field or file."""
BOUNDARY_BYTES_MAX: Final = 70
"""RFC 2046, 5.1.1."""
OVERHEAD_BYTES_MAX: Final = 64 * 1024
"""Of everything that is not data. The parser walks over what surrounds a boundary byte by byte."""
CHUNK_BYTES: Final = 64 * 1024
"""How much is parsed between two checks of the overhead."""
_EXTENDED_FILENAME: Final = b"filename*="
"""How urllib3 before 2 gives filenames that are not ASCII (RFC 5987)."""


# It logs a warning for each form that it rejects: the client gets the error, and must not be able to fill the log.
logging.getLogger("python_multipart").setLevel(logging.CRITICAL)


class Upload(NamedTuple):
    """A file of a form. `filename` is the client's and not trusted; it may be empty."""

    filename: str
    data: bytes


@dataclass(frozen=True, slots=True)
class Form:
    """Fields and files by name. A field may be repeated, a file may not."""

    fields: Mapping[str, Sequence[str]] = field(default_factory=dict)
    files: Mapping[str, Upload] = field(default_factory=dict)


def is_form(content_type: bytes | None) -> bool:
    """Whether a `content-type` header announces a multipart form."""
    return content_type is not None and content_type.partition(b";")[0].strip().lower() == MEDIA_TYPE


def read_form(content_type: bytes | None, body: bytes) -> Form:
    """Parse a form. Raises `Refusal` with INVALID_REQUEST if the body is not a form, is truncated, or exceeds a
    limit."""
    if not is_form(content_type):
        raise Refusal(Code.INVALID_REQUEST, "the body must be multipart/form-data")
    boundary = parse_options_header(content_type)[1].get(b"boundary", b"")
    if not 0 < len(boundary) <= BOUNDARY_BYTES_MAX:
        raise Refusal(Code.INVALID_REQUEST, "content-type: multipart/form-data needs a boundary of 1 to 70 bytes")
    reading = _Reading()
    parser = MultipartParser(
        boundary,
        {
            "on_part_begin": reading.begin,
            "on_part_data": reading.data,
            "on_part_end": reading.end,
            "on_header_field": reading.header_name,
            "on_header_value": reading.header_value,
            "on_header_end": reading.header_end,
            "on_headers_finished": reading.headers_end,
            "on_end": reading.finish,
        },
    )
    try:
        for at in range(0, len(body), CHUNK_BYTES):
            chunk = body[at : at + CHUNK_BYTES]
            parser.write(chunk)
            if reading.finished:
                break
            if at + len(chunk) - reading.data_bytes > OVERHEAD_BYTES_MAX:
                raise Refusal(
                    Code.INVALID_REQUEST,
                    f"more than {OVERHEAD_BYTES_MAX} bytes of the form are not data of its parts",
                )
    except FormParserError as error:
        raise Refusal(Code.INVALID_REQUEST, f"the body is not valid multipart/form-data: {error}") from error
    if not reading.finished:
        raise Refusal(Code.INVALID_REQUEST, "the body is not valid multipart/form-data: it ends within a part")
    return Form(reading.fields, reading.files)


class _Reading:
    """The form as parsed so far. Pieces are views of the body until their part is complete."""

    def __init__(self) -> None:
        self.fields: dict[str, list[str]] = {}
        self.files: dict[str, Upload] = {}
        self.finished = False
        self.data_bytes = 0
        self._parts = 0

    def begin(self) -> None:
        self._parts += 1
        if self._parts > PARTS_MAX:
            raise Refusal(Code.INVALID_REQUEST, f"the form has more than {PARTS_MAX} parts")
        self._name = ""
        self._filename: str | None = None
        self._header, self._value = b"", b""
        self._pieces: list[memoryview] = []
        self._size = 0

    def header_name(self, data: bytes, start: int, end: int) -> None:
        self._header += data[start:end]

    def header_value(self, data: bytes, start: int, end: int) -> None:
        self._value += data[start:end]

    def header_end(self) -> None:
        if self._header.lower() == b"content-disposition":
            kind, options = parse_options_header(self._value)
            filename = options.get(b"filename")
            if filename is None and _EXTENDED_FILENAME in self._value.lower():
                filename = b""
            self._name = _text(options.get(b"name", b""), "name of a part") if kind == b"form-data" else ""
            self._filename = None if filename is None else filename.decode(errors="replace")
        self._header, self._value = b"", b""

    def headers_end(self) -> None:
        if not self._name or len(self._name) > NAME_BYTES_MAX:
            raise Refusal(
                Code.INVALID_REQUEST, f"every part of the form must have a name of at most {NAME_BYTES_MAX} bytes"
            )

    def data(self, data: bytes, start: int, end: int) -> None:
        self._pieces.append(memoryview(data)[start:end])
        self._size += end - start
        self.data_bytes += end - start
        if self._filename is None and self._size > FIELD_BYTES_MAX:
            text = f"{self._name}: longer than {FIELD_BYTES_MAX} bytes; a file needs a filename"
            raise Refusal(Code.INVALID_REQUEST, text, self._name)

    def end(self) -> None:
        content = b"".join(self._pieces)
        if self._filename is not None:
            if self._name in self.files:
                text = f"'{self._name}' is given more than once; one file is taken"
                raise Refusal(Code.INVALID_REQUEST, text, self._name)
            self.files[self._name] = Upload(self._filename, content)
        else:
            self.fields.setdefault(self._name, []).append(_text(content, self._name))

    def finish(self) -> None:
        self.finished = True


def _text(data: bytes, what: str) -> str:
    try:
        return data.decode()
    except UnicodeDecodeError:
        raise Refusal(Code.INVALID_REQUEST, f"{what}: not UTF-8", what) from None
