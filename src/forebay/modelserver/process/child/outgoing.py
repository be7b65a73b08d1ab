"""Encoding in the child: outputs of a backend into the pieces of a packet."""

from collections.abc import Mapping, Sequence
from typing import Final, NamedTuple

from forebay.core.serving.config import Datatype
from forebay.core.serving.values import Buffer, Parameter
from forebay.engines.tensor.protocol import Array, Request, Response, Rows
from forebay.modelserver.process.channel import Channel, Parcel
from forebay.modelserver.process.child.arrays import BadTensor, tensor_of
from forebay.modelserver.process.messages import Ask, Piece, Reply, ToChild
from forebay.modelserver.process.segments import ALIGN

ERROR_CHARS_MAX: Final = 64 << 10

_Tensor = tuple[str, Datatype, Array, Buffer, int]


class EncodedReplies(NamedTuple):
    """The encoded result of a batch: a reply for each request, or the outputs of all requests as columns."""

    replies: tuple[Reply | None, ...]
    columns: tuple[Piece, ...] = ()
    sizes: tuple[int, ...] = ()


def finished(
    channel: Channel[ToChild], responses: Sequence[Response | None], declared: Mapping[str, Datatype]
) -> tuple[EncodedReplies, Parcel]:
    """Encode the end of a batch. BYTES are sent in replies: their rows have no fixed size."""
    if type(responses) is Rows:
        try:
            tensors = _tensors(responses.outputs, declared)
        except BadTensor:
            tensors = []
        if tensors and all(tensor[1] is not Datatype.BYTES for tensor in tensors):
            parcel = channel.parcel(sum(tensor[4] + ALIGN for tensor in tensors))
            return EncodedReplies((), _pieces(parcel, tensors), tuple(responses.sizes)), parcel
    told, parcel = replies(channel, responses, declared, held=False)
    return EncodedReplies(tuple(told)), parcel


def replies(
    channel: Channel[ToChild], responses: Sequence[Response | None], declared: Mapping[str, Datatype], *, held: bool
) -> tuple[list[Reply | None], Parcel]:
    """Encode the responses of one packet. A response that cannot be encoded becomes an error."""
    told: list[list[_Tensor] | str] = []
    size = 0
    for response in responses:
        try:
            tensors = [] if response is None else _tensors(response.outputs, declared)
        except BadTensor as bad:
            told.append(str(bad))
            continue
        told.append(tensors)
        for tensor in tensors:
            size += tensor[4] + ALIGN
    parcel = channel.parcel(size, held=held)
    return [_reply(parcel, response, tensors) for response, tensors in zip(responses, told, strict=True)], parcel


def ask(channel: Channel[ToChild], request: Request) -> tuple[Ask, Parcel]:
    """Encode a request to another model. Raises `BadTensor`."""
    tensors = _tensors(request.inputs, dict.fromkeys(request.bf16, Datatype.BF16))
    parcel = channel.parcel(sum(tensor[4] + ALIGN for tensor in tensors))
    told = Ask(
        plain(request.id),
        _pieces(parcel, tensors),
        tuple(map(plain, request.wanted)),
        _plain(request.parameters),
        request.correlation_id,
        request.start,
        request.end,
        request.timeout_us,
        request.priority,
    )
    return told, parcel


def plain(text: str) -> str:
    """The text with unpaired surrogates replaced, and as `str` itself: no others can be encoded."""
    return text if type(text) is str and text.isascii() else text.encode("utf-8", "replace").decode()


def error_text(text: str) -> str:
    """A model's error text, encodable and of bounded length."""
    return plain(text[:ERROR_CHARS_MAX])


def _plain(parameters: Mapping[str, Parameter]) -> dict[str, Parameter]:
    return {plain(name): plain(value) if isinstance(value, str) else value for name, value in parameters.items()}


def _tensors(arrays: Mapping[str, Array], declared: Mapping[str, Datatype]) -> list[_Tensor]:
    return [(plain(name), *tensor_of(name, array, declared)) for name, array in arrays.items()]


def _pieces(parcel: Parcel, tensors: list[_Tensor]) -> tuple[Piece, ...]:
    pieces = []
    for name, datatype, array, data, size in tensors:
        part, offset = parcel.put(data, size)
        pieces.append(Piece(name, datatype, array.shape, part, offset, size))
    return tuple(pieces)


def _reply(parcel: Parcel, response: Response | None, tensors: list[_Tensor] | str) -> Reply | None:
    if response is None:
        return None
    if isinstance(tensors, str):
        return Reply(error=error_text(tensors))
    pieces = _pieces(parcel, tensors) if tensors else ()
    parameters = _plain(response.parameters) if response.parameters else {}
    return Reply(pieces, parameters, error_text(response.error), response.kind, response.reschedule)
