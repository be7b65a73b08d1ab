"""Decision frames and the audit chain: whatever happens to the bytes, what is whole is read, and damage is named."""

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from forebay.wire.records import (
    FRAME_BYTES_MAX,
    HEADER,
    MAGIC,
    NOTHING,
    Attempt,
    AuditLine,
    Candidate,
    Chain,
    Decision,
    Event,
    Flaw,
    Head,
    Kind,
    Verifier,
    decision,
    frame,
    payloads,
    unseal,
)

CANDIDATE = Candidate("chat-0", 3, "ready", 2, 10, 0.1, 0.2, 0.3, 0.4, 0.5, 1.5, 1.6, 128.0)
text = st.text(max_size=20)
seconds = st.floats(0, 1e6)
decisions = st.builds(
    Decision,
    ts=seconds,
    request_id=text,
    model=text,
    tenant=text,
    status=st.integers(100, 599),
    code=text,
    total_s=seconds,
    candidates=st.lists(st.just(CANDIDATE), max_size=3).map(tuple),
    attempts=st.lists(st.just(Attempt("chat-0", "fewest requests", "ok", 0.5)), max_size=2).map(tuple),
    prompt_tokens=st.integers(0, 1 << 40),
    estimated=st.booleans(),
)


# --- frames


@given(st.lists(decisions, max_size=5))
def test_what_was_framed_is_read_again(records: list[Decision]) -> None:
    read = payloads(b"".join(map(frame, records)))

    assert [decision(payload) for payload in read.whole] == records
    assert read.damaged == 0


@st.composite
def damaged_files(draw: st.DrawFn) -> tuple[bytes, list[Decision]]:
    """A file of frames with one stretch replaced, and the records outside of that stretch."""
    drawn = draw(st.lists(decisions, min_size=1, max_size=6))
    records = [msgspec.structs.replace(record, ts=float(n)) for n, record in enumerate(drawn)]
    frames = [frame(record) for record in records]
    content = b"".join(frames)
    start = draw(st.integers(0, len(content)))
    end = draw(st.integers(start, min(len(content), start + draw(st.sampled_from((0, 1, 40, 4000))))))
    other = draw(st.binary(max_size=40) | st.just(MAGIC) | st.just(MAGIC + b"\0\0\0\x10"))
    untouched, at = [], 0
    for record, piece in zip(records, frames, strict=True):
        if at + len(piece) <= start or at >= end:
            untouched.append(record)
        at += len(piece)
    return content[:start] + other + content[end:], untouched


@settings(max_examples=30)  # each is a whole file
@given(damaged_files())
def test_damage_never_raises_and_costs_only_what_it_touches(case: tuple[bytes, list[Decision]]) -> None:
    content, untouched = case
    read = payloads(content)
    found = [decision(payload) for payload in read.whole]

    assert [record for record in found if record in untouched] == untouched
    assert read.damaged <= 1


@given(st.lists(decisions, min_size=1, max_size=4), st.data())
def test_any_changed_byte_is_one_damaged_frame(records: list[Decision], data: st.DataObject) -> None:
    content = bytearray(b"".join(map(frame, records)))
    content[data.draw(st.integers(0, len(content) - 1))] ^= data.draw(st.integers(1, 255))
    read = payloads(bytes(content))

    assert (len(read.whole), read.damaged) == (len(records) - 1, 1)


@given(st.binary(max_size=2000))
def test_nonsense_is_no_frame(content: bytes) -> None:
    assert payloads(content).whole == []


def test_a_record_of_another_kind_or_version_is_no_surprise() -> None:
    record = Decision(1.0, "a", "m", "t", 200, "ok", 0.5)
    fields = msgspec.msgpack.decode(msgspec.msgpack.encode(record))

    assert decision(msgspec.msgpack.encode([2, "of another kind"])) is None
    assert decision(b"\xc1") is None
    assert decision(msgspec.msgpack.encode([*fields, "a field of a newer version"])) == record
    assert decision(msgspec.msgpack.encode(fields[:8])) == record, "one of an older version, with fewer fields"


def test_a_record_that_is_too_large_is_not_framed() -> None:
    assert frame(Decision(1.0, "a" * FRAME_BYTES_MAX, "m", "t", 200, "ok", 0.5)) == b""
    assert payloads(HEADER.pack(MAGIC, FRAME_BYTES_MAX + 1, 0)) == ([], 1)


# --- the audit chain


def line(n: int, event: str = "request", **more: object) -> AuditLine:
    return AuditLine(0, "", "", event, float(n), request_id=f"req-{n}", tenant="acme", **more)  # type: ignore[arg-type]


def chain(count: int) -> tuple[list[bytes], Head]:
    """Lines without their newlines, and the head."""
    writer = Chain("gateway-0", Head())
    return [writer.seal(line(n)).rstrip(b"\n") for n in range(1, count + 1)], writer.head


def check(lines: list[bytes], head: Head | None, *, archived: bool = False) -> list[Flaw]:
    verifier = Verifier("gateway-0", head, archived=archived)
    flaws = [verifier.feed(raw, number) for number, raw in enumerate(lines, 1)]
    return [*(flaw for flaw in flaws if flaw is not None), *verifier.finish()]


def resealed(raw: bytes, **changes: object) -> bytes:
    """A line changed by somebody who can compute hashes."""
    sealed = unseal(raw)
    assert sealed is not None
    forged = msgspec.structs.replace(sealed.line, **changes)
    writer = Chain(forged.chain, Head(forged.seq - 1, forged.prev))
    name = forged.chain
    again = writer.seal(forged).rstrip(b"\n")
    assert unseal(again) is not None
    assert writer.name == name
    return again


def test_a_line_is_json_that_names_the_one_before_it_and_its_own_hash() -> None:
    lines, head = chain(2)
    first, second = (msgspec.json.decode(raw) for raw in lines)

    assert (first["seq"], first["prev"], first["chain"]) == (1, NOTHING, "gateway-0")
    assert second["prev"] == first["hash"]
    assert head == Head(2, second["hash"])
    assert "prompt" not in first
    assert list(second)[-1] == "hash"


@pytest.mark.parametrize("count", [0, 1, 7])
def test_a_whole_chain_has_no_flaw(count: int) -> None:
    assert check(*chain(count)) == []


def test_lines_after_the_head_are_fine() -> None:
    lines, _ = chain(5)

    assert check(lines, chain(3)[1]) == []


@given(st.integers(1, 6), st.data())
def test_any_changed_byte_is_found(count: int, data: st.DataObject) -> None:
    lines, head = chain(count)
    content = bytearray(b"".join(raw + b"\n" for raw in lines))
    at = data.draw(st.integers(0, len(content) - 1))
    content[at] ^= data.draw(st.integers(1, 255))

    assert check(bytes(content).split(b"\n")[: -1 if content.endswith(b"\n") else None], head)


@given(st.integers(1, 8), st.data())
def test_any_removed_lines_are_found(count: int, data: st.DataObject) -> None:
    lines, head = chain(count)
    start = data.draw(st.integers(0, count - 1))
    end = data.draw(st.integers(start + 1, count))
    flaws = check(lines[:start] + lines[end:], head)

    assert [flaw.kind for flaw in flaws] == [Kind.MISSING]
    assert flaws[0].line == (0 if end == count else start + 1), "where the gap is"


def test_any_two_lines_in_another_order_are_found() -> None:
    for first in range(5):
        for second in range(first + 1, 5):
            lines, head = chain(5)
            lines[first], lines[second] = lines[second], lines[first]
            assert check(lines, head), (first, second)


LINES, HEAD = chain(6)
OTHERS = [Chain("gateway-1", Head()).seal(line(n)).rstrip(b"\n") for n in range(1, 2)]
FORGED = resealed(LINES[2], tenant="someone else")


@pytest.mark.parametrize(
    ("lines", "head", "expected"),
    [
        ([*LINES[:2], LINES[2].replace(b"acme", b"evil"), *LINES[3:]], HEAD, [(Kind.CHANGED, 3)]),
        ([LINES[0].replace(b"acme", b"evil"), *LINES[1:]], HEAD, [(Kind.CHANGED, 1)]),
        ([*LINES[:5], LINES[5].replace(b"acme", b"evil")], HEAD, [(Kind.CHANGED, 6)]),
        ([*LINES[:2], LINES[2][:-70] + b"f" * 68 + b'"}', *LINES[3:]], HEAD, [(Kind.NO_LINE, 3)]),
        ([*LINES[:2], b"", *LINES[2:]], HEAD, [(Kind.NO_LINE, 3)]),
        ([b"", *LINES], HEAD, [(Kind.NO_LINE, 1)]),
        ([b"{}", *LINES[1:]], HEAD, [(Kind.NO_LINE, 1)]),
        ([*LINES[:5], b"{}"], HEAD, [(Kind.NO_LINE, 6)]),
        ([*LINES[:2], FORGED, *LINES[3:]], HEAD, [(Kind.REPLACED, 4)]),
        ([*LINES[:5], resealed(LINES[5], tenant="x")], HEAD, [(Kind.REPLACED, 0)]),
        ([*LINES[:4], LINES[3], *LINES[4:]], HEAD, [(Kind.OUT_OF_ORDER, 5)]),
        (OTHERS, None, [(Kind.FOREIGN, 1), (Kind.NO_HEAD, 0)]),
        (LINES, None, [(Kind.NO_HEAD, 0)]),
        ([], HEAD, [(Kind.MISSING, 0)]),
    ],
)
def test_damage_is_named_with_its_place(
    lines: list[bytes], head: Head | None, expected: list[tuple[Kind, int]]
) -> None:
    assert [(flaw.kind, flaw.line) for flaw in check(lines, head)] == expected


def test_a_beginning_that_was_moved_away_is_missing_unless_it_was_said_or_pruned() -> None:
    lines, head = chain(6)
    writer = Chain("gateway-0", head)
    second = unseal(lines[1])
    assert second is not None
    pruned = writer.seal(line(7, Event.PRUNED, pruned_seq=2, pruned_hash=second.hash)).rstrip(b"\n")

    assert [flaw.kind for flaw in check(lines[2:], head)] == [Kind.MISSING]
    assert check(lines[2:], head, archived=True) == []
    assert check([*lines[2:], pruned], writer.head) == []
    assert [flaw.kind for flaw in check([*lines[3:], pruned], writer.head)] == [Kind.MISSING]


def test_losses_that_the_gateway_put_on_record_are_told_and_doubts_are_damage() -> None:
    writer = Chain("gateway-0", Head())
    lines = [
        writer.seal(line(1, event, why="so it is", lines=3)).rstrip(b"\n") for event in (Event.GAP, Event.BROKEN)
    ]
    verifier = Verifier("gateway-0", writer.head)
    flaws = [verifier.feed(raw, number) for number, raw in enumerate(lines, 1)]

    assert flaws == [None, Flaw(Kind.ON_RECORD, 2, "so it is")]
    assert [gap.lines for gap in verifier.gaps] == [3]
    assert verifier.finish() == []


@given(st.binary(max_size=300))
def test_nonsense_is_no_audit_line(raw: bytes) -> None:
    assert unseal(raw) is None
    assert unseal(raw + b',"hash":"' + b"0" * 64 + b'"}') is None
