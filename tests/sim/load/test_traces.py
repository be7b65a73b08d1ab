"""Reading traces: every known kind becomes the same values, and what cannot be read is refused with a clear error."""

import gzip
import json
import re
import tempfile
from pathlib import Path
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from forebay.sim.load.traces import decisions, lines
from forebay.sim.load.traces.lines import LINE_BYTES_MAX, TOKENS_MAX, BadTrace
from forebay.sim.load.traces.mooncake import quantum_ms
from forebay.sim.load.traces.read import read
from forebay.sim.load.values import Arrival, Workload
from forebay.wire.records import Decision, frame

MOONCAKE = b"""
{"timestamp": 2000, "input_length": 1025, "output_length": 7, "hash_ids": [4, 5, 6]}
{"timestamp": 1500, "input_length": 0, "output_length": 0, "hash_ids": []}

{"timestamp": 4500, "input_length": 512, "output_length": 3, "hash_ids": [4], "type": "text"}
"""
AZURE = b"""\xef\xbb\xbfTIMESTAMP,ContextTokens,GeneratedTokens\r
2023-11-16 18:17:04.5000000,1025,7\r
2023-11-16 18:17:04.0000000,0,0\r
2023-11-16 19:17:07+01:00,512,3\r
"""
SECONDS = b"t_s,input_tokens,output_tokens\n2,1025,7\n1.5,0,0\n4.5,512,3\n"
CLIENTS = b"t_s,input_tokens,output_tokens,client,len_imputed\n2,1025,7,9,1\n1.5,0,0,b,0\n4.5,512,3,9,0"
MOVED = b"other, Client, output_tokens, input_tokens, t_s\n,9,7,1025,2\n,b,0,0,1.5\n,9,3,512,4.5"


def written(folder: Path, content: bytes, name: str = "trace") -> Path:
    path = folder / name
    path.write_bytes(content)
    return path


def done(at_s: float, **fields: object) -> Decision:
    """A record of a request that came at `at_s` and took 2 s."""
    known: dict[str, object] = {"model": "chat", "tenant": "", "status": 200, "code": "ok", "total_s": 2.0}
    return Decision(ts=at_s + 2.0, request_id=f"r{at_s:g}", **{**known, **fields})  # type: ignore[arg-type]


RECORDS = (
    done(1002.0, tenant="9", prompt_tokens=1025, completion_tokens=7, cached_tokens=1024),
    done(1001.5, tenant="b", prompt_tokens=1, completion_tokens=0),
    done(1003.0, tenant="9", status=429, code="rate_limit_exceeded"),
    done(1004.5, tenant="9", prompt_tokens=512, completion_tokens=3),
)


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize(
    ("content", "blocks", "tenants"),
    [
        (MOONCAKE, ((), (4, 5, 6), (4,)), ("", "", "")),
        (AZURE, ((), (), ()), ("", "", "")),
        (SECONDS, ((), (), ()), ("", "", "")),
        (CLIENTS, ((), (), ()), ("b", "9", "9")),
        (MOVED, ((), (), ()), ("b", "9", "9")),
        (b"".join(map(frame, RECORDS)), ((), (), ()), ("b", "9", "9")),
    ],
)
def test_trace_format_is_detected_by_content(
    tmp_path: Path, content: bytes, blocks: tuple[tuple[int, ...], ...], tenants: tuple[str, ...], packed: bool
) -> None:
    path = written(tmp_path, gzip.compress(content) if packed else content)

    arrivals = read(path, Random(1)).arrivals

    plain = ((0.0, 1, 1), (0.5, 1025, 7), (3.0, 512, 3))
    assert list(arrivals) == [
        Arrival(*row, blocks=ids, tenant=tenant) for row, ids, tenant in zip(plain, blocks, tenants, strict=True)
    ]


def test_rows_with_equal_times_stay_in_order(tmp_path: Path) -> None:
    rows = "\n".join(f"{at},{number},1" for number, at in enumerate([3, 1, 3, 1, 2], 1))
    read_back = read(written(tmp_path, f"t_s,input_tokens,output_tokens\n{rows}".encode()), Random(1))

    assert [(arrival.at_s, arrival.prompt_tokens) for arrival in read_back.arrivals] == [
        (0.0, 2), (0.0, 4), (1.0, 5), (2.0, 1), (2.0, 3),
    ]  # fmt: skip


# --- decision records


def test_records_folder_is_read_for_all_gateways_with_missing_parts_named(tmp_path: Path) -> None:
    for number, record in enumerate(RECORDS):
        folder = tmp_path / "records" / f"gw-{number % 2}"
        folder.mkdir(parents=True, exist_ok=True)
        written(folder, b"damage" + frame([record]), f"decisions-{number:08}.log")

    whole = read(tmp_path / "records", Random(1))
    one = read(tmp_path / "records" / "gw-1", Random(1))

    assert [arrival.prompt_tokens for arrival in whole.arrivals] == [1, 1025, 512]
    assert whole.name == "records (left out, without tokens: 1) (damaged parts: 4)"
    assert [arrival.prompt_tokens for arrival in one.arrivals] == [1, 512]


def test_rejected_requests_of_unknown_model_do_not_count_for_other_models(tmp_path: Path) -> None:
    path = written(tmp_path, b"".join(map(frame, (done(1.0, model=""), done(2.0, prompt_tokens=2)))))
    found = read(path, Random(1))

    assert [arrival.prompt_tokens for arrival in found.arrivals] == [2]
    assert "left out, without tokens: 1" in found.name


def test_records_of_several_models_require_a_choice(tmp_path: Path) -> None:
    two = (done(1.0, prompt_tokens=1), done(2.0, model="embed", prompt_tokens=2))
    path = written(tmp_path, b"".join(map(frame, two)))

    assert [arrival.prompt_tokens for arrival in read(path, Random(1), model="embed").arrivals] == [2]
    with pytest.raises(BadTrace, match=r"several models, one must be chosen \(--model\): chat, embed"):
        read(path, Random(1))
    with pytest.raises(BadTrace, match="no record of the model 'x', but of: chat, embed"):
        read(path, Random(1), model="x")


@pytest.mark.parametrize(
    ("record", "text"),
    [
        (done(float("inf"), prompt_tokens=1), "a time more than a year off"),
        (done(float("nan"), prompt_tokens=1), "a time more than a year off"),
        (done(1e9, prompt_tokens=1), "a time more than a year off"),
        (done(2.0, prompt_tokens=-1), "tokens outside of 0 to 10,000,000"),
        (done(2.0, prompt_tokens=1, completion_tokens=TOKENS_MAX + 1), "tokens outside of 0 to 10,000,000"),
    ],
)
def test_invalid_record_is_rejected(tmp_path: Path, record: Decision, text: str) -> None:
    path = written(tmp_path, frame([done(1.0, prompt_tokens=1)]) + frame([record]))

    with pytest.raises(BadTrace, match=text):
        read(path, Random(1))


# --- clocks that tick too seldom


def ticking(tick_ms: int, count: int) -> bytes:
    rows = ({"timestamp": n // 4 * tick_ms, "input_length": n + 1, "output_length": 1} for n in range(count))
    return "\n".join(map(json.dumps, rows)).encode()


def test_requests_within_a_clock_tick_are_spread_in_order(tmp_path: Path) -> None:
    path = written(tmp_path, ticking(3000, 400))

    workload = read(path, Random(1))

    assert workload.name == "trace (3 s ticks jittered)"
    assert [arrival.prompt_tokens for arrival in workload.arrivals] == list(range(1, 401))
    assert {int(arrival.at_s // 3) for arrival in workload.arrivals} == set(range(100))
    assert len({arrival.at_s for arrival in workload.arrivals}) == 400
    assert [*read(path, Random(1)).arrivals] == [*workload.arrivals] != [*read(path, Random(2)).arrivals]


@pytest.mark.parametrize(
    ("stamps", "expected"),
    [
        ([0, *range(0, 30_000, 3000)], 3000),
        ([7, *range(7, 70, 5)], 5),
        (list(range(0, 60_000, 3000)), 0),  # no two requests share a time
        ([0, 0, 3000, 6000], 0),  # too few to tell
        ([0, *range(0, 30_000, 3000), 45_001, 47_999], 3000),  # ticks are not all alike, and some are missing
        ([0, *range(0, 30_000, 3000), 31_500], 0),
        ([0, *range(20)], 0),  # the clock counts milliseconds
        ([0, *(n * n for n in range(20))], 0),
        ([], 0),
    ],
)
def test_coarse_clock_is_detected(stamps: list[float], expected: int) -> None:
    assert quantum_ms([float(stamp) for stamp in stamps]) == expected


# --- what cannot be read

SECONDS_HEADER = b"t_s,input_tokens,output_tokens\n"


@pytest.mark.parametrize(
    ("content", "text"),
    [
        (b"", r"line 0: found nothing; a trace is one of: JSON lines .*Mooncake.*Azure.*ServeGen.*decision records"),
        (b"\n \n", "line 2: found nothing; a trace is one of"),
        (b"hello\x00\xff world", r"line 1: found 'hello·· world'; a trace is one of"),
        (b"a,b,c\n1,2,3", "line 1: found 'a,b,c'; a trace is one of"),
        (b"x" * 200, "line 1: found 'x{80}'…; a trace"),
        (SECONDS_HEADER, "it has no requests"),
        (SECONDS_HEADER + b"1,2,3\n\n1,2", "line 4: found '1,2'; a time and two whole numbers"),
        (SECONDS_HEADER + b"1,2,x", "line 2: found '1,2,x'; a time and two whole numbers"),
        (SECONDS_HEADER + b"1,2," + b"9" * 5000, "line 2: found .*…; a time and two whole numbers"),
        (SECONDS_HEADER + b"1,-2,3", "line 2: found '1,-2,3'; tokens must be 0 to 10,000,000"),
        (SECONDS_HEADER + b"1,2,10000001", "line 2: found .* tokens must be 0 to 10,000,000"),
        (SECONDS_HEADER + b"-1,2,3", "line 2: found '-1,2,3'; times must not be negative"),
        (SECONDS_HEADER + b"nan,2,3", "line 2: found .* times must not"),
        (SECONDS_HEADER + b"inf,2,3", "line 2: found .* times must not"),
        (SECONDS_HEADER + b"1,2,3\n1e300,2,3", "line 3: found .* nor span more than a year"),
        (SECONDS_HEADER + b"1e300,2,3\n1,2,3", "line 3: found .* nor span more than a year"),
        (b"t_s,input_tokens,output_tokens,client\n1,2,3", "line 2: found '1,2,3'; a time and"),
        (b"TIMESTAMP,ContextTokens,GeneratedTokens\nyesterday,2,3", "line 2: found 'yesterday,2,3'; a time and"),
        (b"TIMESTAMP,ContextTokens,GeneratedTokens\n1960-01-01,2,3", "line 2: found .* times must not be negative"),
        (b"{", "line 1: invalid line of Mooncake's format"),
        (b"{}\n", "line 1: invalid line of Mooncake's format: .*timestamp"),
        (MOONCAKE + b"[]", "line 6: invalid line of Mooncake's format"),
        (MOONCAKE.replace(b"2000", b"-1"), "line 2: .*invalid line of Mooncake's format: .*timestamp"),
        (MOONCAKE.replace(b"1025", b"1e9"), "line 2: .*invalid line of Mooncake's format: .*input_length"),
        (
            MOONCAKE.replace(b"1025", b"1024"),
            "line 2: 3 blocks of 512 tokens are more than a prompt of 1024 tokens has",
        ),
        (MOONCAKE.replace(b"[4]", b"[-4]"), "line 5: .*invalid line of Mooncake's format: .*hash_ids"),
        (b"\n" * 3 + b"{" * (LINE_BYTES_MAX + 1), "line 4: the line is longer than 1048576 bytes"),
        (b"\x1f\x8bno gzip", "the file is truncated or damaged"),
        (gzip.compress(CLIENTS, mtime=0)[:-20], "the file is truncated or damaged"),
        (gzip.compress(CLIENTS, mtime=0)[:-8] + b"12345678", "the file is truncated or damaged"),
        (gzip.compress(b"", mtime=0), "line 0: found nothing"),
    ],
)
def test_unreadable_row_error_names_file_line_and_value(tmp_path: Path, content: bytes, text: str) -> None:
    path = written(tmp_path, content)

    with pytest.raises(BadTrace, match=f"^{re.escape(str(path))}(, |: ).*{text}") as caught:
        read(path, Random(1))
    assert len(str(caught.value)) < 1000


def test_missing_file_and_folder_without_records_are_rejected(tmp_path: Path) -> None:
    with pytest.raises(BadTrace, match="none: No such file or directory"):
        read(tmp_path / "none", Random(1))
    with pytest.raises(BadTrace, match="it has no requests"):
        read(tmp_path, Random(1))


def test_too_large_trace_is_rejected(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lines, "ROWS_MAX", 3)
    monkeypatch.setattr(decisions, "ROWS_MAX", 3)
    table = written(tmp_path, SECONDS_HEADER + b"1,1,1\n" * 3)
    records = written(tmp_path, frame([done(1.0, prompt_tokens=1)]) * 4, "records")

    with pytest.raises(BadTrace, match="line 4: there are more than 3 lines"):
        read(table, Random(1))
    with pytest.raises(BadTrace, match="there are more than 3 records"):
        read(records, Random(1))


PIECES = st.sampled_from(
    [
        MOONCAKE, AZURE, SECONDS, CLIENTS, *map(frame, RECORDS), gzip.compress(SECONDS, mtime=0), b"\n", b",", b"{",
        b"}", b"[", b'{"timestamp":', b"1e999", b"-1", b"9" * 30, b"NaN", b"t_s,", b"2023-11-16 25:00:00",
        b"9999-12-31 23:59:59-23:00", b"0001-01-01,1,1\n", b"\x00", b"\xff", b"\xc1fb1",
    ]
)  # fmt: skip


@given(st.lists(PIECES | st.binary(max_size=12), max_size=8).map(b"".join), st.booleans(), st.integers(0, 400))
def test_any_trace_bytes_are_parsed_or_rejected(content: bytes, packed: bool, cut: int) -> None:
    if packed:
        content = gzip.compress(content)
    with tempfile.TemporaryDirectory() as folder:
        path = written(Path(folder), content[: -cut or None])
        try:
            workload = read(path, Random(1))
        except BadTrace as error:
            assert str(error).startswith(str(path))  # noqa: PT017 - that it is raised is no must
        else:
            assert_sound(workload)


def assert_sound(workload: Workload) -> None:
    times = [arrival.at_s for arrival in workload.arrivals]
    assert times
    assert times == sorted(times)
    assert times[0] >= 0
    for arrival in workload.arrivals:
        assert 1 <= arrival.prompt_tokens <= TOKENS_MAX
        assert 1 <= arrival.output_tokens <= TOKENS_MAX
        assert len(arrival.blocks) <= -(-arrival.prompt_tokens // workload.block_tokens)
