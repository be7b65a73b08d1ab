"""Inputs and outputs sent as one column for all requests of a batch."""

import socket
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from typing import Any

import numpy as np
import pytest

from forebay.core.serving.config import Datatype
from forebay.core.serving.values import Tensor
from forebay.engines.tensor.protocol import Array, Response, Rows
from forebay.modelserver.process import encoding
from forebay.modelserver.process.channel import Channel, ChannelBroken
from forebay.modelserver.process.child import outgoing
from forebay.modelserver.process.messages import Execute, Finished, Piece, ToChild, ToServer
from forebay.modelserver.process.segments import Sharing
from forebay.modelserver.process.values import Answer, Work


@contextmanager
def channels() -> Iterator[tuple[Channel[ToChild], Channel[ToServer]]]:
    one, other = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    child = Channel[ToChild](one, ToChild, Sharing.READ)
    server = Channel[ToServer](other, ToServer, Sharing.BOTH)
    with closing(child), closing(server):
        yield child, server


def sent(responses: Sequence[Response | None]) -> tuple[Finished, list[Answer | None]]:
    """What the server gets, and makes of it."""
    with channels() as (child, server):
        (replies, columns, sizes), parcel = outgoing.finished(child, responses, {})
        child.send(*child.pack(Finished(1, replies, 0, 0, 0, 0, columns, sizes), parcel))
        received = server.receive()
        message = received.message
        assert isinstance(message, Finished)
        if message.sizes:
            return message, list(encoding.answers(message.columns, message.sizes, received.parts))
        return message, [None if each is None else encoding.answer(each, received.parts) for each in message.replies]


@pytest.mark.parametrize("width", [3, 100_000])
def test_batched_outputs_are_sent_as_columns_and_split_per_request(width: int) -> None:
    x: Array = np.arange(4 * width, dtype=np.float32).reshape(4, width)
    y: Array = np.array([7, 8, 9, 10], np.int64)

    message, answers = sent(Rows({"X": x[:, ::-1], "Y": y}, [1, 0, 3]))

    assert [piece.shape for piece in message.columns] == [(4, width), (4,)]
    for answer, rows in zip(answers, (slice(0, 1), slice(1, 1), slice(1, 4)), strict=True):
        assert answer is not None
        (first, second) = answer.outputs
        assert (first.name, first.datatype, first.shape) == ("X", Datatype.FP32, (rows.stop - rows.start, width))
        assert bytes(first.data) == x[rows, ::-1].tobytes()
        assert (second.shape, bytes(second.data)) == ((rows.stop - rows.start,), y[rows].tobytes())


def test_strings_and_unsupported_outputs_are_sent_per_request() -> None:
    message, answers = sent(Rows({"S": np.array([[b"a"], [b"bc"]], object)}, [1, 1]))
    assert not message.sizes
    assert [bytes(answer.outputs[0].data)[4:] for answer in answers if answer is not None] == [b"a", b"bc"]

    message, answers = sent(Rows({"C": np.ones((2, 1), np.complex64)}, [1, 1]))
    assert not message.sizes
    assert all(answer is not None and "complex64" in str(answer.error) for answer in answers)


def test_batch_without_rows_still_has_responses() -> None:
    _, answers = sent(Rows({"X": np.ones((0, 2), np.float32)}, [0, 0]))

    assert [answer.outputs[0].shape for answer in answers if answer is not None] == [(0, 2)] * 2


@pytest.mark.parametrize(
    ("shape", "size", "sizes"),
    [((3, 2), 24, (1, 1)), ((2, 2), 15, (1, 1)), ((2, 2), 16, (3, -1)), ((), 16, (1, 1)), ((2, 2), 17, (1, 1))],
)
def test_columns_inconsistent_with_the_batch_break_the_channel(
    shape: tuple[int, ...], size: int, sizes: tuple[int, ...]
) -> None:
    piece = Piece("X", Datatype.FP32, shape, 0, 0, size)

    with pytest.raises(ChannelBroken):
        encoding.answers([piece], sizes, [memoryview(bytes(16))])


def told(*requests: tuple[Tensor, ...]) -> tuple[Execute, list[memoryview]]:
    """What the child gets of a batch."""
    with channels() as (child, server):
        batch, parcel = encoding.asks(server, [Work("", inputs) for inputs in requests])
        server.send(*server.pack(Execute(1, *batch), parcel))
        received = child.receive()
        assert isinstance(received.message, Execute)
        return received.message, received.parts


def tensor(rows: int, name: str = "X", *shape: int, datatype: Datatype = Datatype.UINT8) -> Tensor:
    size = rows * int(np.prod(shape)) * (1 if datatype is Datatype.UINT8 else 2)
    return Tensor(name, datatype, (rows, *shape), bytes([rows]) * size)


@pytest.mark.parametrize("width", [3, 50_000])
def test_inputs_differing_only_in_rows_are_sent_as_columns(width: int) -> None:
    batch, parts = told(*((tensor(rows, "X", width), tensor(rows, "Y")) for rows in (1, 2, 0, 3)))

    assert batch.sizes == (1, 2, 0, 3)
    assert [(piece.name, piece.shape) for piece in batch.columns] == [("X", (6, width)), ("Y", (6,))]
    assert [ask.inputs for ask in batch.asks] == [()]
    found = [bytes(parts[each.part][each.offset : each.offset + each.size]) for each in batch.columns]
    assert found == [b"".join(bytes([rows]) * (rows * each) for rows in (1, 2, 3)) for each in (width, 1)]


@pytest.mark.parametrize(
    "change",
    [
        {"id": "2"},
        {"wanted": ("Y",)},
        {"parameters": {"a": 1}},
        {"correlation_id": 7},
        {"start": True},
        {"end": True},
        {"timeout_us": 5},
        {"priority": 1},
    ],
    ids=lambda change: next(iter(change)),
)
@pytest.mark.parametrize("place", [0, 1])
def test_requests_that_differ_in_more_than_inputs_are_described_one_by_one(
    change: dict[str, Any], place: int
) -> None:
    plain: dict[str, Any] = {"id": "1", "inputs": (tensor(1),)}
    works = [Work(**plain), Work(**plain)]
    works[place] = Work(**plain | change)
    with channels() as (_, server):
        assert len(encoding.asks(server, [Work(**plain), Work(**plain)])[0].asks) == 1
        batch, _ = encoding.asks(server, works)
    assert batch.sizes == (1, 1)
    assert [(each.id, each.priority) for each in batch.asks] == [(work.id, work.priority) for work in works]


APART = {
    "a request alone": [(tensor(1),)],
    "other inputs": [(tensor(1),), (tensor(1), tensor(1, "Y"))],
    "an input twice, and not at all": [(tensor(1), tensor(1)), ()],
    "no inputs": [(), ()],
    "scalars": [(Tensor("X", Datatype.UINT8, (), b"a"),)] * 2,
    "a scalar": [(tensor(1),), (Tensor("X", Datatype.UINT8, (), b"a"),)],
    "no rows": [(tensor(0),), (tensor(1),)],
    "other shapes": [(tensor(1, "X", 2),), (tensor(1, "X", 3),)],
    "other types": [(tensor(2),), (tensor(1, datatype=Datatype.INT16),)],
    "strings": [(Tensor("X", Datatype.BYTES, (1,), b"\1\0\0\0a"),)] * 2,
    "rows that are not those of the other input": [(tensor(1), tensor(1, "Y")), (tensor(1), tensor(2, "Y"))],
    "bytes that are not those of the shape": [(tensor(1),), (Tensor("X", Datatype.UINT8, (1,), b"ab"),)],
}


@pytest.mark.parametrize("case", APART)
def test_incompatible_inputs_are_sent_per_request(case: str) -> None:
    batch, parts = told(*APART[case])

    assert (batch.columns, batch.sizes) == ((), ())
    for ask, inputs in zip(batch.asks, APART[case], strict=True):
        assert [(each.name, each.datatype, each.shape) for each in ask.inputs] == [
            (each.name, each.datatype, each.shape) for each in inputs
        ]
        for piece, given in zip(ask.inputs, inputs, strict=True):
            assert parts[piece.part][piece.offset : piece.offset + piece.size] == given.data
