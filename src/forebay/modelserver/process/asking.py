"""What the server sends and gets: requests become the pieces of a packet, and pieces answers."""

from collections.abc import Sequence
from typing import Final

from forebay.core.serving.errors import Refused
from forebay.core.serving.values import Tensor
from forebay.modelserver.process.channel import ALIGN, FDS_MAX, Channel, ChannelBroken, Parcel
from forebay.modelserver.process.messages import Ask, Piece, Reply, ToServer
from forebay.modelserver.process.segments import Segment, where
from forebay.modelserver.process.values import Answer, Work

REFER_BYTES_MIN: Final = 16 << 10
"""A tensor that lies in another child's segment is copied all the same if it is smaller."""

_Place = tuple[Segment, int] | None


def asks(channel: Channel[ToServer], works: Sequence[Work]) -> tuple[tuple[Ask, ...], Parcel]:
    """The requests of a batch. The same input of all requests lies in one place, in their order.

    Raises `SegmentBroken`: there is no memory for so much.
    """
    columns: dict[str, list[tuple[int, Tensor, int, _Place]]] = {}
    size = 0
    referred: set[Segment] = set()
    for index, work in enumerate(works):
        for tensor in work.inputs:
            data = tensor.data
            length = data.nbytes if type(data) is memoryview else len(data)
            place = None
            if length >= REFER_BYTES_MIN and type(data) is memoryview:
                place = _place(data, referred)
            if place is None:
                size += length + ALIGN
            columns.setdefault(tensor.name, []).append((index, tensor, length, place))
    parcel = channel.parcel(size)
    pieces: list[list[Piece]] = [[] for _ in works]
    for column in columns.values():
        align = True
        for index, tensor, length, place in column:
            name, datatype, shape, data = tensor
            if place is None:
                part, offset = parcel.put(data, length, align=align)
                align = False
            else:
                assert type(data) is memoryview
                segment, offset = place
                part = channel.refer(parcel, segment, data)
            pieces[index].append(Piece(name, datatype, shape, part, offset, length))
    return tuple([_ask(work, its) for work, its in zip(works, pieces, strict=True)]), parcel


def reply(channel: Channel[ToServer], answer: Answer) -> tuple[Reply, Parcel | None]:
    """A response for a model that has called another one. Raises as `asks` does."""
    if answer.error is not None:
        return Reply((), {}, answer.error.text or "it failed", answer.error.kind), None
    (told,), parcel = asks(channel, [Work("", answer.outputs)])
    return Reply(told.inputs, dict(answer.parameters)), parcel


def answer(told: Reply, parts: Sequence[memoryview]) -> Answer:
    """A child's response. Raises `ChannelBroken`."""
    if told.error:
        return Answer((), told.parameters, Refused(told.kind, told.error))
    return Answer(tensors(told.outputs, parts), told.parameters, None, told.reschedule)


def answers(columns: Sequence[Piece], sizes: Sequence[int], parts: Sequence[memoryview]) -> tuple[Answer | None, ...]:
    """The responses to a batch whose outputs come in columns: their rows in order. Raises `ChannelBroken`."""
    found = []
    total = sum(sizes)
    for name, datatype, shape, data in tensors(columns, parts):
        if min(sizes) < 0 or shape[:1] != (total,) or (total and len(data) % total):
            raise ChannelBroken(f"tensor '{name}' has not the rows of its requests")
        found.append((name, datatype, shape[1:], data, len(data) // total if total else 0))
    made: list[Answer | None] = []
    start = 0
    for size in sizes:
        end = start + size
        outputs = [
            Tensor(name, datatype, (size, *shape), data[start * step : end * step])
            for name, datatype, shape, data, step in found
        ]
        made.append(Answer(tuple(outputs)))
        start = end
    return tuple(made)


def tensors(pieces: Sequence[Piece], parts: Sequence[memoryview]) -> tuple[Tensor, ...]:
    """The tensors that pieces are. Raises `ChannelBroken`."""
    made = []
    for piece in pieces:
        part, offset, size = piece.part, piece.offset, piece.size
        data = parts[part][offset : offset + size] if 0 <= part < len(parts) else parts[0][:0]
        if len(data) != size:
            raise ChannelBroken(f"tensor '{piece.name}' lies outside of what was sent")
        made.append(Tensor(piece.name, piece.datatype, piece.shape, data))
    return tuple(made)


def _place(data: memoryview, referred: set[Segment]) -> _Place:
    place = where(data)
    if place is None or place[0].fd < 0 or (place[0] not in referred and len(referred) >= FDS_MAX):
        return None
    referred.add(place[0])
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
