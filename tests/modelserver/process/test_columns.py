"""Outputs that come as one piece for all requests of a batch."""

import socket
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager

import numpy as np
import pytest

from forebay.core.serving.config import Datatype
from forebay.engines.tensor.protocol import Array, Response, Rows
from forebay.modelserver.process import asking
from forebay.modelserver.process.channel import Channel, ChannelBroken
from forebay.modelserver.process.child import outgoing
from forebay.modelserver.process.messages import Finished, Piece, ToChild, ToServer
from forebay.modelserver.process.segments import Sharing
from forebay.modelserver.process.values import Answer


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
        child.send(*child.pack(Finished(1, replies, 0, 0, 0, 0, "", columns, sizes), parcel))
        received = server.receive()
        message = received.message
        assert isinstance(message, Finished)
        if message.sizes:
            return message, list(asking.answers(message.columns, message.sizes, received.parts))
        return message, [None if each is None else asking.answer(each, received.parts) for each in message.replies]


@pytest.mark.parametrize("width", [3, 100_000])
def test_rows_go_as_one_piece_for_each_output_and_every_request_gets_its_own(width: int) -> None:
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


def test_strings_and_outputs_that_cannot_be_told_go_one_by_one() -> None:
    message, answers = sent(Rows({"S": np.array([[b"a"], [b"bc"]], object)}, [1, 1]))
    assert not message.sizes
    assert [bytes(answer.outputs[0].data)[4:] for answer in answers if answer is not None] == [b"a", b"bc"]

    message, answers = sent(Rows({"C": np.ones((2, 1), np.complex64)}, [1, 1]))
    assert not message.sizes
    assert all(answer is not None and "complex64" in str(answer.error) for answer in answers)


def test_a_batch_without_any_row_has_answers_all_the_same() -> None:
    _, answers = sent(Rows({"X": np.ones((0, 2), np.float32)}, [0, 0]))

    assert [answer.outputs[0].shape for answer in answers if answer is not None] == [(0, 2)] * 2


@pytest.mark.parametrize(
    ("shape", "size", "sizes"),
    [((3, 2), 24, (1, 1)), ((2, 2), 15, (1, 1)), ((2, 2), 16, (3, -1)), ((), 16, (1, 1)), ((2, 2), 17, (1, 1))],
)
def test_columns_that_are_not_those_of_the_batch_are_the_end_of_the_channel(
    shape: tuple[int, ...], size: int, sizes: tuple[int, ...]
) -> None:
    piece = Piece("X", Datatype.FP32, shape, 0, 0, size)

    with pytest.raises(ChannelBroken):
        asking.answers([piece], sizes, [memoryview(bytes(16))])
