"""The cache of decoded header blocks: entries are used as long as they decode to the same headers."""

import pytest
from hpack import Decoder, Encoder
from hypothesis import given
from hypothesis import strategies as st

from forebay.wire.http2 import headers as module
from forebay.wire.http2.headers import BadBlock, Blocks, Header, written

tokens = st.binary(min_size=1, max_size=6)
lists = st.lists(st.tuples(st.sampled_from([b"a", b"b", b"grpc-timeout", b":path"]), tokens), max_size=6)


@given(st.lists(st.tuples(lists, st.booleans(), st.sampled_from([None, 0, 64, 4096])), max_size=30))
def test_cached_block_equals_an_uncached_decode(
    rounds: list[tuple[list[Header], bool, int | None]],
) -> None:
    encoder, plain = Encoder(), Decoder()
    blocks: Blocks[list[Header]] = Blocks(list)
    for headers, huffman, table in rounds:
        if table is not None:
            encoder.header_table_size = table
        block = encoder.encode(headers, huffman=huffman)
        assert blocks.decode(block) == [tuple(each) for each in plain.decode(block, raw=True)] == headers


def test_block_without_table_changes_is_decoded_once() -> None:
    read: list[int] = []
    blocks: Blocks[int] = Blocks(lambda headers: read.append(1) or len(headers))
    encoder = Encoder()
    encoder.encode([(b"a", b"b")])
    blocks.decode(Encoder().encode([(b"a", b"b")]))
    same = encoder.encode([(b"a", b"b"), (b"a", b"b")])
    assert [blocks.decode(same) for _ in range(3)] == [2, 2, 2]
    assert len(read) == 2


@pytest.mark.interpreted
def test_number_of_cached_blocks_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "KEPT_MAX", 3)
    blocks: Blocks[list[Header]] = Blocks(list)
    for number in range(10):
        header = (b"a", b"%d" % number)
        assert blocks.decode(written([header])) == [header]
        assert len(blocks._kept) <= 3
    blocks.decode(written([(b"a", bytes(module.KEPT_BYTES_MAX))]))
    assert len(blocks._kept) <= 3


@given(st.lists(st.tuples(tokens, st.binary(max_size=400)), max_size=5))
def test_encoded_blocks_decode_the_same_everywhere(headers: list[Header]) -> None:
    assert [tuple(each) for each in Decoder().decode(written(headers), raw=True)] == headers


@pytest.mark.parametrize(
    "block", [b"\xff\xff\xff\xff\xff\xff\xff", b"\x40\x7f", b"\x00", b"\x40\x81\xff\x00", b"\x3f\xe1\xff\x03"]
)
def test_damaged_blocks_are_rejected(block: bytes) -> None:
    with pytest.raises(BadBlock):
        Blocks(list).decode(block)
