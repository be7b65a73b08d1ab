"""Content codings: which one a response uses, and that encoded bodies decode again."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from forebay.core.serving.errors import Kind, Refused
from forebay.wire.oip.coding import DEFLATE, GZIP, IDENTITY, answer_coding, decoded, encoded

ACCEPTED = [
    (b"", IDENTITY),
    (b"gzip", GZIP),
    (b" Deflate ; q=0.5, identity", DEFLATE),
    (b"gzip, deflate;q=0, br;q=0.00", GZIP),
    (b"deflate, gzip", IDENTITY),
    (b"gzip;q=0", IDENTITY),
    (b"br", IDENTITY),
    (b"gzip, *", IDENTITY),
    (b"gzip;q=x", GZIP),
]


@pytest.mark.parametrize(("accept", "coding"), ACCEPTED)
def test_a_response_is_compressed_for_a_single_accepted_coding(accept: bytes, coding: bytes) -> None:
    assert answer_coding(accept) == coding


@given(st.sampled_from([GZIP, DEFLATE]), st.binary(max_size=200))
def test_compressed_body_is_decompressed_within_its_limit(coding: bytes, whole: bytes) -> None:
    packed = encoded(coding, whole)
    assert decoded(coding.upper(), packed, len(whole)) == whole
    if whole:
        with pytest.raises(Refused, match="Decompressed data size exceeds the maximum"):
            decoded(coding, packed, len(whole) - 1)
    with pytest.raises(Refused, match="is truncated"):
        decoded(coding, packed[:-1], 1000)
    with pytest.raises(Refused, match="goes on after its compressed data"):
        decoded(coding, packed + packed, 1000)


def test_other_codings_are_passed_through_or_rejected() -> None:
    assert decoded(b"identity", b"x", 1) == b"x"
    assert decoded(b"", b"x", 1) == b"x"
    with pytest.raises(Refused) as refused:
        decoded(b"br", b"x", 1)
    assert refused.value.kind is Kind.UNSUPPORTED
    with pytest.raises(Refused, match="nothing to decompress"):
        decoded(b"gzip", b"", 1)
    with pytest.raises(Refused, match="does not match its Content-Encoding"):
        decoded(b"gzip", b"not gzip", 1)
