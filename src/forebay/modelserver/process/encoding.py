"""Encoding on the server's side: requests into the pieces of a packet, and pieces into responses."""

from collections.abc import Sequence
from typing import Final, NamedTuple

from forebay.core.serving.config import ELEMENT_BYTES, Datatype
from forebay.core.serving.errors import Refused
from forebay.core.serving.values import Tensor
from forebay.modelserver.process.channel import FDS_MAX, Channel, ChannelBroken, Parcel
from forebay.modelserver.process.messages import Ask, Piece, Reply, ToServer
from forebay.modelserver.process.segments import ALIGN, Segment, where
from forebay.modelserver.process.values import Answer, Work

REFER_BYTES_MIN: Final = 16 << 10
"""A tensor that lies in a segment already is passed by reference from this size on; smaller ones are copied."""

_Place = tuple[Segment, int] | None


class EncodedBatch(NamedTuple):
    """An encoded batch. If its inputs are sent as columns, see `Execute`."""

    asks: tuple[Ask, ...]
    columns: tuple[Piece, ...] = ()
    sizes: tuple[int, ...] = ()


class _Input:  # not a named tuple: compiled code creates instances of a plain class without the interpreter
    """An input of one request of a batch."""

    __slots__ = ("index", "length", "place", "tensor")

    def __init__(self, index: int, tensor: Tensor, length: int, place: _Place) -> None:
        self.index = index
        self.tensor = tensor
        self.length = length
        self.place = place
        """Segment and offset if it already lies in one: as another model's output, or as it arrived."""


def asks(channel: Channel[ToServer], works: Sequence[Work]) -> tuple[EncodedBatch, Parcel]:
    """Encode the requests of a batch. The values of an input lie next to each other, in request order.

    Raises `SegmentBroken` if the batch is larger than any segment.
    """
    columns: dict[str, list[_Input]] = {}
    size = 0
    referred: dict[Segment, set[int]] = {}  # the offsets in each segment
    for index, work in enumerate(works):
        for tensor in work.inputs:
            data = tensor.data
            length = data.nbytes if type(data) is memoryview else len(data)
            place = None
            if length >= REFER_BYTES_MIN and type(data) is memoryview:
                place = _place(data, tensor.datatype, referred)
            if place is None:
                size += length + ALIGN
            columns.setdefault(tensor.name, []).append(_Input(index, tensor, length, place))
    parcel = channel.parcel(size)
    if len(works) > 1:
        sizes = _sizes(list(columns.values()), len(works))
        if sizes:
            whole = tuple([_whole(parcel, column, sum(sizes)) for column in columns.values()])
            told = works[:1] if _alike(works) else works
            return EncodedBatch(tuple([_ask(work, ()) for work in told]), whole, sizes), parcel
    pieces: list[list[Piece]] = [[] for _ in works]
    for column in columns.values():
        align = True
        for each in column:
            tensor = each.tensor
            data = tensor.data
            if each.place is None:
                part, offset = parcel.put(data, each.length, align=align)
                align = False
            else:
                assert type(data) is memoryview
                segment, offset = each.place
                part = channel.refer(parcel, segment, data)
            piece = Piece(tensor.name, tensor.datatype, tensor.shape, part, offset, each.length)
            pieces[each.index].append(piece)
    return EncodedBatch(tuple([_ask(work, its) for work, its in zip(works, pieces, strict=True)])), parcel


def _alike(works: Sequence[Work]) -> bool:
    """Whether only the inputs differ, as they do unless clients send ids or parameters."""
    first = works[0]
    if first.parameters:
        return False
    for work in works:
        if work.id != first.id or work.wanted != first.wanted or work.parameters:
            return False
        if work.correlation_id != first.correlation_id or work.start != first.start or work.end != first.end:
            return False
        if work.timeout_us != first.timeout_us or work.priority != first.priority:
            return False
    return True


def _sizes(columns: Sequence[list[_Input]], count: int) -> tuple[int, ...]:
    """Rows of each request, if the rows of all requests form one tensor per input; else empty."""
    sizes: list[int] = []
    for number, column in enumerate(columns):
        tensor = column[0].tensor
        datatype, first = tensor.datatype, tensor.shape
        if len(column) != count or datatype is Datatype.BYTES or not first or not first[0]:
            return ()
        row_bytes = column[0].length // first[0]
        for index, each in enumerate(column):
            shape = each.tensor.shape
            if each.index != index or each.place is not None or each.tensor.datatype is not datatype:
                return ()
            if shape != first and (not shape or shape[1:] != first[1:]):
                return ()
            if each.length != shape[0] * row_bytes or (number and sizes[index] != shape[0]):
                return ()
            if not number:
                sizes.append(shape[0])
    return tuple(sizes)


def _whole(parcel: Parcel, column: list[_Input], rows: int) -> Piece:
    """An input of all requests as one piece."""
    first = column[0].tensor
    size = column[0].length
    part, offset = parcel.put(first.data, size)
    for each in column[1:]:
        parcel.put(each.tensor.data, each.length, align=False)
        size += each.length
    return Piece(first.name, first.datatype, (rows, *first.shape[1:]), part, offset, size)


def reply(channel: Channel[ToServer], answer: Answer) -> tuple[Reply, Parcel | None]:
    """Encode a response to a model that has called another one. Raises as `asks` does."""
    if answer.error is not None:
        return Reply((), {}, answer.error.text or "it failed", answer.error.kind), None
    told, parcel = asks(channel, [Work("", answer.outputs)])
    return Reply(told.asks[0].inputs, dict(answer.parameters)), parcel


def answer(told: Reply, parts: Sequence[memoryview]) -> Answer:
    """Decode a child's response. Raises `ChannelBroken`."""
    if told.error:
        return Answer((), told.parameters, Refused(told.kind, told.error))
    return Answer(tensors(told.outputs, parts), told.parameters, reschedule=told.reschedule)


def answers(columns: Sequence[Piece], sizes: Sequence[int], parts: Sequence[memoryview]) -> tuple[Answer | None, ...]:
    """Decode the responses of a batch whose outputs were sent as columns. Raises `ChannelBroken`."""
    found = []
    total = sum(sizes)
    for whole in tensors(columns, parts):
        shape, size = whole.shape, len(whole.data)
        if min(sizes) < 0 or shape[:1] != (total,) or (total and size % total):
            raise ChannelBroken(f"tensor '{whole.name}' does not have the rows of its requests")
        found.append((whole.name, whole.datatype, shape[1:], whole.data, size // total if total else 0))
    made: list[Answer | None] = []
    start = 0
    for rows in sizes:
        end = start + rows
        outputs = [
            Tensor(name, datatype, (rows, *shape), data[start * step : end * step])
            for name, datatype, shape, data, step in found
        ]
        made.append(Answer(tuple(outputs)))
        start = end
    return tuple(made)


def tensors(pieces: Sequence[Piece], parts: Sequence[memoryview]) -> tuple[Tensor, ...]:
    """The tensors that the pieces describe, as views. Raises `ChannelBroken`."""
    made = []
    for piece in pieces:
        part, offset, size = piece.part, piece.offset, piece.size
        data = parts[part][offset : offset + size] if 0 <= part < len(parts) else parts[0][:0]
        if len(data) != size:
            raise ChannelBroken(f"tensor '{piece.name}' lies outside the packet's data")
        made.append(Tensor(piece.name, piece.datatype, piece.shape, data))
    return tuple(made)


def _place(data: memoryview, datatype: Datatype, referred: dict[Segment, set[int]]) -> _Place:
    place = where(data)
    if place is None or place[0].fd < 0:
        return None
    segment, offset = place
    if offset % ELEMENT_BYTES.get(datatype, 1):  # clients lay their tensors out as they like
        return None
    offsets = referred.get(segment)
    if offsets is None:
        if len(referred) >= FDS_MAX:
            return None
        offsets = referred[segment] = set()
    if offset in offsets:  # steps of an ensemble share it: a model that writes to one input must not change others
        return None
    offsets.add(offset)
    return place


def _ask(work: Work, pieces: Sequence[Piece]) -> Ask:
    return Ask(
        work.id,
        tuple(pieces),
        work.wanted,
        dict(work.parameters),
        work.correlation_id,
        work.start,
        work.end,
        work.timeout_us,
        work.priority,
    )
