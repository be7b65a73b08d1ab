"""What a bench run sends, and when."""

from contextlib import suppress
from dataclasses import replace
from itertools import islice, pairwise, takewhile
from random import Random

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from forebay.cli.bench import plan
from forebay.cli.bench.plan import (
    BadPlan,
    Plan,
    arrivals,
    body,
    parse_header,
    parse_lengths,
    parse_url,
    recipe,
    request_bytes,
)

PLAN = Plan("http://127.0.0.1:8080", "chat", "chat", 4, None, 10, None, 0, "8", "16", True, False, 1, 0, 60.0)


@pytest.mark.parametrize(
    ("text", "low", "high"), [("1", 1, 1), ("128", 128, 128), ("64-512", 64, 512), ("lognormal:200,0.5,900", 1, 900)]
)
def test_lengths_are_drawn_within_their_bounds(text: str, low: int, high: int) -> None:
    rng = Random(1)
    drawn = [parse_lengths("--prompt-tokens", text).draw(rng) for _ in range(500)]

    assert min(drawn) >= low
    assert max(drawn) <= high


def test_a_log_normal_length_has_its_median() -> None:
    rng = Random(1)
    drawn = sorted(parse_lengths("-", "lognormal:200,0.5").draw(rng) for _ in range(2001))

    assert drawn[1000] == pytest.approx(200, rel=0.1)


@pytest.mark.parametrize(
    "text", ["", "0", "-1", "5-2", "1e3", "many", "1-2-3", "lognormal:5", "lognormal:5,9", "9999999999", "1-2000000"]
)
def test_invalid_length_is_rejected_with_allowed_forms(text: str) -> None:
    with pytest.raises(BadPlan, match=r"--prompt-tokens: found .*; allowed: N, LOW-HIGH"):
        parse_lengths("--prompt-tokens", text)


@given(st.text(max_size=40))
def test_any_text_is_a_length_or_rejected(text: str) -> None:
    with suppress(BadPlan):
        assert 1 <= parse_lengths("--x", text).draw(Random(0)) <= plan.TOKENS_MAX


@pytest.mark.parametrize(
    ("url", "host", "port", "path"),
    [
        ("http://127.0.0.1:8080", "127.0.0.1", 8080, "/v1"),
        ("http://127.0.0.1:8080/v1/", "127.0.0.1", 8080, "/v1"),
        ("localhost:9000", "localhost", 9000, "/v1"),
        ("http://[::1]:81/openai/v1", "::1", 81, "/openai/v1"),
        ("https://example", "example", 443, "/v1"),
    ],
)
def test_base_url_is_split_into_host_port_and_path(url: str, host: str, port: int, path: str) -> None:
    target = parse_url(url)

    assert (target.host, target.port, target.path) == (host, port, path)


@pytest.mark.parametrize("url", ["https://", "http://", "ftp://x", "http://x:99999", "http://x:y", "http://ü/v1"])
def test_invalid_url_is_rejected(url: str) -> None:
    with pytest.raises(BadPlan, match="--url: found"):
        parse_url(url)


@given(st.text(max_size=60))
def test_any_text_is_a_url_or_rejected(text: str) -> None:
    with suppress(BadPlan):
        url = parse_url(text).url
        assert url.startswith(("http://", "https://"))
        assert url.isprintable()


def test_arrivals_are_a_poisson_process() -> None:
    times = list(takewhile(lambda at: at < 100, arrivals(50.0, Random(7))))
    gaps = [b - a for a, b in pairwise(times)]
    mean = sum(gaps) / len(gaps)
    variance = sum((g - mean) ** 2 for g in gaps) / len(gaps)

    assert times == sorted(times)
    assert mean == pytest.approx(1 / 50, rel=0.05)
    assert variance**0.5 == pytest.approx(mean, rel=0.1)


def test_the_same_seed_gives_the_same_times_and_texts() -> None:
    def first(seed: int) -> tuple[list[float], list[bytes]]:
        rng = Random(seed)
        return list(islice(arrivals(5, rng), 20)), [body(recipe(PLAN), n, rng) for n in range(5)]

    assert first(3) == first(3)
    assert first(3) != first(4)


def test_prompts_are_distinct_from_their_first_word() -> None:
    rng = Random(0)
    texts = [msgspec.json.decode(body(recipe(PLAN), n, rng))["messages"][0]["content"] for n in range(200)]

    assert len({text.split()[0] for text in texts}) == 200


def test_a_temperature_is_sent_only_if_one_is_given() -> None:
    def sent(temperature: float | None) -> object:
        return msgspec.json.decode(body(recipe(replace(PLAN, temperature=temperature)), 0, Random(0))).get(
            "temperature"
        )

    assert [sent(each) for each in (None, 0.0, 0.7)] == [None, 0, 0.7]
    with pytest.raises(BadPlan, match="--temperature: found 3; allowed: from 0 to 2"):
        sent(3.0)


def test_fixed_output_sets_ignore_eos() -> None:
    document = msgspec.json.decode(body(recipe(replace(PLAN, fixed_output=True)), 0, Random(0)))

    assert document["ignore_eos"] is True
    assert document["max_tokens"] == 16
    assert document["stream_options"] == {"include_usage": True}


def test_embeddings_send_a_batch_and_never_stream() -> None:
    checked = recipe(replace(PLAN, task="embed", batch=3))
    document = msgspec.json.decode(body(checked, 5, Random(0)))

    assert not checked.stream
    assert document.keys() == {"model", "input", "encoding_format"}
    assert [text.split()[0] for text in document["input"]] == ["15:", "16:", "17:"]


def test_a_request_is_one_complete_http_message() -> None:
    content = b'{"a": 1}'
    head, _, rest = request_bytes(recipe(replace(PLAN, api_key="secret")), content).partition(b"\r\n\r\n")

    assert rest == content
    assert head.startswith(b"POST /v1/chat/completions HTTP/1.1\r\nhost: 127.0.0.1:8080\r\n")
    assert b"\r\nauthorization: Bearer secret" in head
    assert b"\r\ncontent-length: 8" in head


def test_custom_headers_are_sent() -> None:
    own = recipe(replace(PLAN, headers=("X-Forebay-Priority: batch ", "x-empty:")))

    head = request_bytes(own, b"{}").partition(b"\r\n\r\n")[0]

    assert own.headers == (("x-forebay-priority", "batch"), ("x-empty", ""))
    assert b"\r\nx-forebay-priority: batch\r\nx-empty: \r\n" in head


@pytest.mark.parametrize(
    "text", ["", "batch", ":batch", "a b: c", "x: é", "x: a\r\ny: b", "Host: here", "content-length: 9", "x:\x00"]
)
def test_invalid_header_is_rejected(text: str) -> None:
    with pytest.raises(BadPlan, match=r"--header: found .*; allowed: "):
        parse_header(text)


@given(st.text(max_size=40))
def test_any_header_text_is_one_line_or_rejected(text: str) -> None:
    with suppress(BadPlan):
        name, value = parse_header(text)
        assert name == name.lower()
        assert not set("\r\n\0") & set(name + value)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"task": "paint"}, "--task"),
        ({"headers": ("x: y",) * 33}, "--header"),
        ({"concurrency": 0}, "--concurrency"),
        ({"concurrency": 10**6}, "--concurrency"),
        ({"rate": 0.0}, "--rate"),
        ({"requests": 0}, "--requests"),
        ({"requests": 10**9}, "--requests"),
        ({"duration_s": 0.0}, "--duration"),
        ({"warmup": -1}, "--warmup"),
        ({"timeout_s": 0.0}, "--timeout"),
        ({"batch": 2}, "--batch"),
        ({"output_tokens": "x"}, "--output-tokens"),
        ({"api_key": "a\r\nb: c"}, "--api-key"),
    ],
)
def test_out_of_range_option_is_rejected_by_name(change: dict[str, object], says: str) -> None:
    with pytest.raises(BadPlan, match=f"^{says}: found"):
        recipe(replace(PLAN, **change))  # type: ignore[arg-type]


def test_number_of_requests_defaults_to_100_and_to_the_maximum_with_a_duration() -> None:
    assert recipe(replace(PLAN, requests=None, duration_s=5.0)).requests == plan.REQUESTS_MAX
    assert recipe(replace(PLAN, requests=None)).requests == 100
