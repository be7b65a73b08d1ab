"""Decision frames and the audit chain: with any damage, intact parts are read and the damage is named."""

import hashlib

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from forebay.wire.records import (
    FRAME_BYTES_MAX,
    HEADER,
    MAGIC,
    NO_CANDIDATES,
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
    Who,
    audit_line,
    candidates,
    end_of,
    frame,
    is_witness,
    packed,
    payloads,
    sound_lines,
    tail,
    unseal,
)
from forebay.wire.records import decisions as read_decisions

text = st.text(max_size=20)
seconds = st.floats(0, 1e6)
count = st.integers(0, 1 << 40)
rows = st.builds(
    Candidate, text, count, st.sampled_from(("ready", "degraded")), count, count, seconds, seconds, seconds, seconds,
    seconds, seconds, seconds, seconds,
)  # fmt: skip
decisions = st.builds(
    Decision,
    ts=seconds,
    request_id=text,
    model=text,
    tenant=text,
    status=st.integers(100, 599),
    code=text,
    total_s=seconds,
    candidates=st.lists(st.just(["chat-0", 3, "ready", 2, 10, 0.1]), max_size=3).map(packed),
    attempts=st.lists(st.just(Attempt("chat-0", "fewest requests", "ok", 0.5)), max_size=2).map(tuple),
    prompt_tokens=st.integers(0, 1 << 40),
    estimated=st.booleans(),
)


# --- frames


@given(st.lists(rows, max_size=4))
def test_candidates_round_trip(found: list[Candidate]) -> None:
    rows = [msgspec.structs.astuple(row) for row in found]
    record = Decision(1.0, "a", "m", "t", 200, "ok", 0.5, candidates=packed(rows))
    (payload,) = payloads(frame([record])).whole

    assert [candidates(each.candidates) for each in read_decisions(payload)] == [found]


def test_candidates_without_a_score_and_of_another_kind() -> None:
    assert candidates(packed([["chat-0", 1, "ready", 0, 8]])) == [Candidate("chat-0", 1, "ready", 0, 8)]
    assert candidates(packed([["chat-0"]])) == []
    assert candidates(NO_CANDIDATES) == []


@given(st.lists(st.lists(decisions, min_size=1, max_size=20), max_size=5))
def test_records_round_trip_through_frames(together: list[list[Decision]]) -> None:
    read = payloads(b"".join(map(frame, together)))

    assert [read_decisions(payload) for payload in read.whole] == together
    assert read.damaged == 0


@st.composite
def damaged_files(draw: st.DrawFn) -> tuple[bytes, list[Decision]]:
    """A file of frames with one stretch replaced, and the records outside of that stretch."""
    drawn = draw(st.lists(decisions, min_size=1, max_size=6))
    records = [msgspec.structs.replace(record, ts=float(n)) for n, record in enumerate(drawn)]
    frames = [frame([record]) for record in records]
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
def test_damage_never_raises_and_loses_only_the_affected_records(case: tuple[bytes, list[Decision]]) -> None:
    content, untouched = case
    read = payloads(content)
    found = [record for payload in read.whole for record in read_decisions(payload)]

    assert [record for record in found if record in untouched] == untouched
    assert read.damaged <= 1


@given(st.lists(decisions, min_size=1, max_size=4), st.data())
def test_modified_byte_damages_exactly_one_frame(records: list[Decision], data: st.DataObject) -> None:
    content = bytearray(b"".join(frame([record]) for record in records))
    content[data.draw(st.integers(0, len(content) - 1))] ^= data.draw(st.integers(1, 255))
    read = payloads(bytes(content))

    assert (len(read.whole), read.damaged) == (len(records) - 1, 1)


@given(st.binary(max_size=2000))
def test_random_bytes_are_not_a_frame(content: bytes) -> None:
    assert payloads(content).whole == []


def test_records_of_other_versions_are_read_and_unknown_kinds_skipped() -> None:
    record = Decision(1.0, "a", "m", "t", 200, "ok", 0.5)
    fields = msgspec.msgpack.decode(msgspec.msgpack.encode(record))

    assert read_decisions(msgspec.msgpack.encode([[2, "of another kind"]])) == []
    assert read_decisions(b"\xc1") == []
    assert read_decisions(msgspec.msgpack.encode([[*fields, "a field of a newer version"]])) == [record]
    assert read_decisions(msgspec.msgpack.encode([fields[:8]])) == [record], "of an older version, with fewer fields"
    assert read_decisions(msgspec.msgpack.encode(record)) == [record], "of an older version, one in a frame"


def test_too_large_record_is_not_framed() -> None:
    assert frame([Decision(1.0, "a" * FRAME_BYTES_MAX, "m", "t", 200, "ok", 0.5)]) == b""
    assert payloads(HEADER.pack(MAGIC, FRAME_BYTES_MAX + 1, 0)) == ([], 1)


# --- the audit chain


def about(event: str, **more: object) -> AuditLine:
    return AuditLine(0, event, 1.0, **more)  # type: ignore[arg-type]


def request(n: int) -> bytes:
    return b'{"event":"request","ts":%d.0,"request_id":"req-%d"}' % (n, n)


def sealed(writer: Chain, lines: int, tenant: str = "acme") -> list[bytes]:
    """A batch of so many lines and their seal, without newlines."""
    for n in range(writer.seq + 1, writer.seq + 1 + lines):
        writer.add_request(request(n), tail(Who(tenant)))
    return writer.seal(9.0).splitlines()


def chain(*sizes: int) -> tuple[list[bytes], Head]:
    """Batches of so many lines each, without their newlines, and the head."""
    writer = Chain("gateway-0", Head())
    return [raw for size in sizes for raw in sealed(writer, size)], writer.head


def check(lines: list[bytes], head: Head | None, *, archived: bool = False) -> list[Flaw]:
    verifier = Verifier("gateway-0", head, archived=archived)
    flaws = [verifier.feed(raw, number) for number, raw in enumerate(lines, 1)]
    return [*(flaw for flaw in flaws if flaw is not None), *verifier.finish()]


def forged(lines: list[bytes]) -> list[bytes]:
    """A batch changed by somebody who can compute hashes."""
    seal = unseal(lines[-1])
    assert seal is not None
    return sealed(Chain(seal.line.chain, seal.before), seal.line.lines, "someone else")


sizes = st.lists(st.integers(1, 4), min_size=1, max_size=4)


def test_seal_is_json_with_the_previous_seal_and_the_hash_of_its_lines() -> None:
    lines, head = chain(2, 1)
    first, second = (msgspec.json.decode(lines[at]) for at in (2, 4))

    assert (first["seq"], first["lines"], first["prev"], first["chain"]) == (2, 2, NOTHING, "gateway-0")
    assert (second["seq"], second["lines"], second["prev"]) == (3, 1, first["hash"])
    assert head == Head(3, second["hash"])
    assert list(second)[-1] == "hash"
    body = lines[4].replace(b',"hash":"%b"' % second["hash"].encode(), b"")
    assert hashlib.sha256(lines[3] + b"\n" + body).hexdigest() == second["hash"], "as anybody can compute it"


def test_request_line_extends_the_access_log_line() -> None:
    raw = chain(1)[0][0]

    assert raw.startswith(request(1)[:-1] + b",")
    assert audit_line(raw) == AuditLine(1, "request", 1.0, request_id="req-1", tenant="acme")


@given(sizes)
def test_intact_chain_has_no_flaws(numbers: list[int]) -> None:
    lines, head = chain(*numbers)

    assert check(lines, head) == []
    assert [line.seq for line in sound_lines(raw + b"\n" for raw in lines)] == list(range(1, sum(numbers) + 1))


def test_empty_chain_and_one_longer_than_its_head_are_valid() -> None:
    assert check([], Head()) == []
    assert check(chain(3, 2)[0], chain(3)[1]) == []


@given(sizes, st.data())
def test_any_modified_byte_is_detected(numbers: list[int], data: st.DataObject) -> None:
    lines, head = chain(*numbers)
    content = bytearray(b"".join(raw + b"\n" for raw in lines))
    at = data.draw(st.integers(0, len(content) - 1))
    content[at] ^= data.draw(st.integers(1, 255))

    assert check(bytes(content).split(b"\n")[: -1 if content.endswith(b"\n") else None], head)


@given(sizes, st.data())
def test_any_removed_lines_are_detected(numbers: list[int], data: st.DataObject) -> None:
    lines, head = chain(*numbers)
    start = data.draw(st.integers(0, len(lines) - 1))
    end = data.draw(st.integers(start + 1, len(lines)))

    assert check(lines[:start] + lines[end:], head)


@given(sizes, st.data())
def test_removed_batches_are_reported_at_their_position(numbers: list[int], data: st.DataObject) -> None:
    start = data.draw(st.integers(0, len(numbers) - 1))
    end = data.draw(st.integers(start + 1, len(numbers)))
    lines, head = chain(*numbers)
    places = [sum(numbers[:n]) + n for n in (start, end)]
    flaws = check(lines[: places[0]] + lines[places[1] :], head)

    assert [flaw.kind for flaw in flaws] == [Kind.MISSING]
    assert flaws[0].line == (0 if end == len(numbers) else places[0] + 1)


def test_swapped_lines_are_detected() -> None:
    whole, head = chain(2, 1, 2)
    for first in range(len(whole)):
        for second in range(first + 1, len(whole)):
            lines = list(whole)
            lines[first], lines[second] = lines[second], lines[first]
            assert check(lines, head), (first, second)


LINES, HEAD = chain(2, 3, 1)  # seals are the third, the seventh and the ninth
OTHERS = sealed(Chain("gateway-1", Head()), 1)


@pytest.mark.parametrize(
    ("lines", "head", "expected"),
    [
        ([*LINES[:4], LINES[4].replace(b"acme", b"evil"), *LINES[5:]], HEAD, [(Kind.CHANGED, 4)]),
        ([LINES[0].replace(b"acme", b"evil"), *LINES[1:]], HEAD, [(Kind.CHANGED, 1)]),
        ([*LINES[:7], LINES[7].replace(b"acme", b"evil"), LINES[8]], HEAD, [(Kind.CHANGED, 8)]),
        ([*LINES[:6], LINES[6].replace(b'"ts":9', b'"ts":8'), *LINES[7:]], HEAD, [(Kind.CHANGED, 4)]),
        ([*LINES[:6], LINES[6][:-70] + b"f" * 68 + b'"}', *LINES[7:]], HEAD, [(Kind.NO_LINE, 7)]),
        ([*LINES[:8], LINES[8][:-2]], HEAD, [(Kind.NO_LINE, 9)]),
        ([*LINES[:4], b"", b"", *LINES[4:]], HEAD, [(Kind.NO_LINE, 5)]),
        ([b"", *LINES], HEAD, [(Kind.NO_LINE, 1)]),
        ([b"{}", *LINES[1:]], HEAD, [(Kind.NO_LINE, 1)]),
        ([*LINES[:3], *LINES[4:]], HEAD, [(Kind.MISSING, 4)]),
        ([*LINES[:4], *LINES[5:]], HEAD, [(Kind.MISSING, 5)]),
        ([*LINES[:5], *LINES[6:]], HEAD, [(Kind.MISSING, 6)]),
        ([*LINES[:5], LINES[4], *LINES[5:]], HEAD, [(Kind.OUT_OF_ORDER, 6)]),
        ([*LINES[:2], *LINES[3:]], HEAD, [(Kind.CHANGED, 1)]),
        ([*LINES[:3], LINES[6], *LINES[7:]], HEAD, [(Kind.CHANGED, 4)]),
        ([*LINES[:3], *forged(LINES[3:7]), *LINES[7:]], HEAD, [(Kind.REPLACED, 8)]),
        ([*LINES[:7], *forged(LINES[7:])], HEAD, [(Kind.REPLACED, 0)]),
        ([*LINES[:7], *LINES[3:7], *LINES[7:]], HEAD, [(Kind.OUT_OF_ORDER, 8)]),
        (OTHERS, None, [(Kind.FOREIGN, 2), (Kind.NO_HEAD, 0)]),
        (LINES, None, [(Kind.NO_HEAD, 0)]),
        (LINES[:8], HEAD, [(Kind.MISSING, 0)]),
        ([], HEAD, [(Kind.MISSING, 0)]),
    ],
)
def test_damage_is_reported_with_its_position(
    lines: list[bytes], head: Head | None, expected: list[tuple[Kind, int]]
) -> None:
    assert [(flaw.kind, flaw.line) for flaw in check(lines, head)] == expected


def test_unsealed_lines_before_another_file_are_a_flaw() -> None:
    verifier = Verifier("gateway-0", HEAD)
    assert [verifier.feed(raw, n) for n, raw in enumerate(LINES[:7], 1)] == [None] * 7
    assert verifier.end_file() is None
    for n, raw in enumerate(LINES[7:8], 1):
        assert verifier.feed(raw, n) is None
    flaw = verifier.end_file()

    assert flaw is not None
    assert (flaw.kind, flaw.line) == (Kind.UNSEALED, 1)
    assert [verifier.feed(raw, n) for n, raw in enumerate(LINES[7:], 1)] == [None, None]
    assert verifier.finish() == []


def test_removed_beginning_is_missing_unless_archived_or_pruned() -> None:
    lines, head = chain(2, 3, 1)
    writer = Chain("gateway-0", head)
    first = unseal(lines[2])
    assert first is not None
    writer.add(about(Event.PRUNED, pruned_seq=2, pruned_hash=first.hash))
    pruned = writer.seal(9.0).splitlines()

    assert [flaw.kind for flaw in check(lines[3:], head)] == [Kind.MISSING]
    assert check(lines[3:], head, archived=True) == []
    assert check([*lines[3:], *pruned], writer.head) == []
    assert [flaw.kind for flaw in check([*lines[7:], *pruned], writer.head)] == [Kind.MISSING]


def test_recorded_gaps_are_reported_and_recorded_doubts_are_flaws() -> None:
    writer = Chain("gateway-0", Head())
    for event in (Event.GAP, Event.LATE, Event.SKIPPED, Event.BROKEN, Event.KILLED, Event.WITNESS):
        writer.add(about(event, why="so it is", lines=3))
    verifier = Verifier("gateway-0", None)
    flaws = [verifier.feed(raw, number) for number, raw in enumerate(writer.seal(9.0).splitlines(), 1)]

    assert flaws == [*[None] * 6, Flaw(Kind.ON_RECORD, 4, "so it is")]
    assert [line.event for line in verifier.gaps] == [Event.GAP, Event.LATE, Event.KILLED]
    assert [line.event for line in verifier.witnessed] == [Event.WITNESS]


@given(sizes, st.data())
def test_witnessed_head_accepts_only_continuations_of_the_chain(numbers: list[int], data: st.DataObject) -> None:
    lines, head = chain(*numbers)
    more = sealed(Chain("gateway-0", head), data.draw(st.integers(1, 4)))
    writer = Chain("gateway-0", Head())
    other = [raw for size in numbers for raw in sealed(writer, size, "someone else")]
    for raws, kind in ((lines, None), (lines + more, None), (lines[: -numbers[-1] - 1], Kind.MISSING)):
        assert against(raws, head) == kind
    assert against(other, head) == Kind.REPLACED
    longer = sealed(Chain("gateway-0", Head()), sum(numbers) + 1)
    assert against(longer, head) == Kind.REPLACED, "it has no seal there"
    assert against(lines, Head()) is None
    began = unseal(lines[numbers[0]])
    assert began is not None
    rest = lines[numbers[0] + 1 :] + more
    assert against(rest, Head(began.line.seq, began.hash)) is None, "pruned, but what follows names it"
    assert against(rest, Head(began.line.seq, "f" * 64)) == Kind.REPLACED
    assert against(rest, Head(began.line.seq - 1, "f" * 64)) is None, "nobody can tell"


def against(raws: list[bytes], seen: Head) -> Kind | None:
    verifier = Verifier("gateway-0", None, wanted=frozenset({seen.seq}))
    for number, raw in enumerate(raws, 1):
        verifier.feed(raw, number)
    flaw = verifier.against(seen, "gateway-1")
    return flaw.kind if flaw is not None else None


def test_witness_lines_cannot_be_forged_by_clients() -> None:
    writer = Chain("gateway-0", Head(1 << 62, "a" * 64))
    writer.add(about(Event.WITNESS, other="gateway-1", other_seq=3, other_hash="b" * 64))
    assert is_witness(writer.seal(9.0).splitlines()[0])
    hostile = '"event":"witness"'
    line = AuditLine(0, Event.REQUEST, 1.0, request_id=hostile, path=hostile, model=hostile, asked=hostile)
    writer.add(line)
    assert not is_witness(writer.seal(9.0).splitlines()[0])


@given(sizes, st.integers(0, 3), st.binary(max_size=20).filter(lambda tail: b"\n" not in tail))
def test_truncated_tail_is_found_and_sealed_later(numbers: list[int], more: int, torn: bytes) -> None:
    lines, head = chain(*numbers)
    whole = b"".join(raw + b"\n" for raw in lines)
    other = Chain("gateway-0", head)
    unsealed = b"".join(raw + b"\n" for raw in sealed(other, more)[:-1]) if more else b""
    end = end_of(whole + unsealed + torn)

    assert end.seal is not None
    assert (end.seal.line.seq, end.seal.hash) == (head.seq, head.hash)
    assert (end.unsealed, end.torn_bytes) == (unsealed, len(torn))
    assert end_of(unsealed + torn) == (None, unsealed, len(torn))
    writer = Chain("gateway-0", head)
    writer.take_up(end.unsealed)
    writer.add(about(Event.LATE, lines=more))
    later = unsealed.splitlines() + writer.seal(9.0).splitlines()
    assert check([*lines, *later], writer.head) == []
    assert writer.seq == head.seq + more + 1


def test_only_unmodified_batches_are_intact() -> None:
    changed = [*LINES[:4], LINES[4].replace(b"acme", b"evil"), *LINES[5:8], b"nonsense"]

    assert [line.seq for line in sound_lines(raw + b"\n" for raw in changed)] == [1, 2, 6]


@given(st.binary(max_size=300))
def test_random_bytes_are_not_a_seal(raw: bytes) -> None:
    assert unseal(raw) is None
    assert unseal(raw + b',"hash":"' + b"0" * 64 + b'"}') is None
