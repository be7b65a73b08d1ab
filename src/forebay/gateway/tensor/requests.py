"""Parse requests for tensor models, and build the upstream request: all headers that say how to read the body, and
the unchanged body. The model is named by the path, or by a field of the body."""

import re
from typing import Any, Final
from urllib.parse import quote, unquote

import msgspec

from forebay.core.errors import Code, Refusal
from forebay.core.model import Task
from forebay.gateway.dispatch.endpoints import Endpoint
from forebay.net.exchange import Exchange
from forebay.net.replica_protocol import GATEWAY
from forebay.wire.apis.request_fields import CODING, FIELD, RequestFields
from forebay.wire.documents import UNREADABLE, unreadable
from forebay.wire.forms.field import find_fields
from forebay.wire.oip.coding import beginning

GET, POST = b"GET", b"POST"
PATHS: Final = frozenset(
    {
        b"/v1/rerank",
        b"/v1/classify",
        b"/v1/audio/transcriptions",
        b"/v1/audio/translations",
        b"/v1/audio/speech",
        b"/v1/images/classifications",
        b"/v1/images/detections",
        b"/v1/images/segmentations",
        b"/v1/images/ocr",
    }
)
"""Task endpoints; the model is a field of the body."""
MODEL_PATH: Final = re.compile(
    rb"/v2/models/(?!stats\Z)([^/]{1,1024})(/versions/[0-9]{1,20})?(?:/(infer|generate|generate_stream|ready|config|stats))?"
)
"""`/v2/models/stats` is about all models, as in Triton."""
WORK: Final = frozenset({b"infer", b"generate", b"generate_stream"})
FORWARDED: Final = (
    b"content-type",
    b"content-encoding",
    b"inference-header-content-length",
    b"accept",
    b"accept-encoding",
)
"""Request headers that are forwarded."""
PACKED: Final = (b"inference-header-content-length", b"content-encoding")
"""Headers of bodies that are not, or not only, text."""
FORM: Final = b"multipart/form-data"
SEQUENCE: Final = b'"sequence_id"'
UNPACKED_BYTES_MAX: Final = 1024 * 1024
"""How much of a compressed body is decompressed to find its sequence: the JSON before tensors is short."""
NOTHING: Final = msgspec.Raw()


class _Named(msgspec.Struct, gc=False):
    model: str
    stream: bool | None = None
    query: msgspec.Raw = NOTHING
    documents: msgspec.Raw = NOTHING
    input: msgspec.Raw = NOTHING


class _Parameters(msgspec.Struct, gc=False):
    sequence_id: int | str = 0
    sequence_start: Any = False


class _Sequence(msgspec.Struct, gc=False):
    parameters: _Parameters | None = None
    sequence_id: int | str = 0
    sequence_start: Any = False


_named = msgspec.json.Decoder(_Named).decode
_sequence = msgspec.json.Decoder(_Sequence).decode


def find(exchange: Exchange, model: str = "") -> Endpoint | None:
    """The endpoint of a tensor request, else None; with `model`, as if the path named that one."""
    path = exchange.target.partition(b"?")[0]
    if path in PATHS:
        return Endpoint(path.decode(), Task.TENSOR, _head(exchange, POST, path))
    match = MODEL_PATH.fullmatch(path)
    if match is None:
        return None
    name, version, action = match.groups(b"")
    if model:
        name = quote(model, safe="").encode()
    method = POST if action in WORK else GET
    target = b"/v2/models/%b%b%b" % (name, version, b"/" + action if action else b"")
    head = _head(exchange, method, target)
    named = unquote(name.decode("latin-1"))
    return Endpoint(path.decode("latin-1"), Task.TENSOR, head, (), method is POST, method, named)


def request_fields(endpoint: Endpoint, exchange: Exchange, body: bytes) -> RequestFields:
    """What routing needs of a request; its text is the whole body, its tokens are estimated from the textual part.

    Raises `Refusal` if it names no model.
    """
    text = memoryview(body)
    if endpoint.model:
        streams = endpoint.path.endswith("/generate_stream")
        sequence, begins = _sequence_of(exchange, body)
        size = 0 if any(exchange.header(name) is not None for name in PACKED) or _is_raw(exchange) else len(body)
        return RequestFields(
            endpoint.model, text, stream=streams, sequence=sequence, begins=begins, choices=0, text_bytes=size
        )
    kind = exchange.header(b"content-type") or b""
    if _is_form(kind):
        places = find_fields(kind, body, (b"model", b"stream"))
        if b"model" not in places:
            raise Refusal(Code.INVALID_REQUEST, "The form has no field `model`.", "model")
        values = {name: body[place.start : place.end] for name, place in places.items()}
        stream = values.get(b"stream", b"").lower() in (b"true", b"1")
        name = values[b"model"].decode("utf-8", "replace")
        return RequestFields(name, text, stream=stream, choices=0, text_bytes=0)
    try:
        named = _named(body)
    except msgspec.ValidationError as error:
        field = FIELD.search(str(error))
        raise Refusal(Code.INVALID_REQUEST, f"{error}.", field[1] if field else None) from None
    except UNREADABLE as error:
        raise Refusal(Code.INVALID_JSON, f"The body is not valid JSON: {unreadable(body, error)}.") from None
    size = len(named.query) + len(named.documents) + len(named.input)
    return RequestFields(named.model, text, stream=named.stream is True, choices=0, text_bytes=size)


def form_renamed(exchange: Exchange, body: bytes, model: str) -> bytes | None:
    """The form with another model; None: the body is no form."""
    kind = exchange.header(b"content-type") or b""
    if not _is_form(kind):
        return None
    place = find_fields(kind, body, (b"model",))[b"model"]  # the request was parsed before, so the field exists
    return b"%b%b%b" % (body[: place.start], model.encode(), body[place.end :])


def _head(exchange: Exchange, method: bytes, target: bytes) -> bytes:
    given = ((name, exchange.header(name)) for name in FORWARDED)
    lines = b"".join([b"%b: %b\r\n" % (name, value) for name, value in given if value is not None])
    return b"%b %b HTTP/1.1\r\nhost: forebay\r\n%b%b: 1\r\nx-request-id: " % (method, target, lines, GATEWAY)


def _is_form(content_type: bytes) -> bool:
    return content_type.partition(b";")[0].strip().lower() == FORM


def _is_raw(exchange: Exchange) -> bool:
    return (exchange.header(b"content-type") or b"").startswith(b"application/octet-stream")


def _sequence_of(exchange: Exchange, body: bytes) -> tuple[bytes, bool]:
    """The sequence id of a request, empty if there is none, or the body is raw or malformed; and whether it begins
    the sequence."""
    length = exchange.header(b"inference-header-content-length")
    size = int(length) if length is not None and length.isdigit() and len(length) < 12 else -1
    if size < 0 and _is_raw(exchange):
        return b"", False
    if (coding := exchange.header(CODING)) is not None:
        body = beginning(coding, body, UNPACKED_BYTES_MAX if size < 0 else min(size, UNPACKED_BYTES_MAX))
    elif size >= 0:
        body = body[:size]
    if SEQUENCE not in body:
        return b"", False
    try:
        read = _sequence(body)
    except UNREADABLE:  # the replica will report it
        return b"", False
    given = read.parameters or _Parameters()
    found, begins = given.sequence_id or read.sequence_id, given.sequence_start or read.sequence_start
    return (str(found).encode("utf-8", "surrogatepass") if found else b""), begins is True
