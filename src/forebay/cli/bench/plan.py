"""What a run sends and when: lengths, prompts, arrival times, request bytes. Pure: randomness comes from `rng`."""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from random import Random
from urllib.parse import urlsplit

import msgspec

REQUESTS_MAX = 1_000_000
REQUESTS_DEFAULT = 100
CONCURRENCY_MAX = 10_000
RATE_MAX = 100_000.0
DURATION_S_MAX = 86_400.0
TOKENS_MAX = 1_000_000
BATCH_MAX = 2048
HEADERS_MAX = 32
TEMPERATURE_MAX = 2.0

WORDS = (
    "time", "year", "people", "way", "day", "man", "thing", "woman", "life", "child", "world", "school", "state",
    "family", "student", "group", "country", "problem", "hand", "part", "place", "case", "week", "company",
    "system", "program", "question", "work", "number", "night", "point", "home", "water", "room", "mother", "area",
    "money", "story", "fact", "month", "lot", "right", "study", "book", "eye", "job", "word", "business", "issue",
    "side", "kind", "head", "house", "service", "friend", "father", "power", "hour", "game", "line", "end",
    "member", "law", "car", "city", "name", "president", "team", "minute", "idea", "body", "information", "back",
)  # fmt: skip
"""Common English words: one token each in most vocabularies."""


class Kind(StrEnum):
    """The endpoint to load."""

    CHAT = "chat"
    COMPLETIONS = "completions"
    EMBED = "embed"


PATHS = {Kind.CHAT: "/chat/completions", Kind.COMPLETIONS: "/completions", Kind.EMBED: "/embeddings"}


class BadPlan(Exception):  # noqa: N818 - states the condition
    """An option is invalid; the text says which, what was found and what is allowed."""


@dataclass(frozen=True, slots=True)
class Lengths:
    """A distribution of lengths in tokens: fixed, uniform, or log-normal around a median and capped at `high`."""

    low: int
    high: int
    median: float | None = None
    sigma: float = 0.0

    def __str__(self) -> str:
        if self.median is not None:
            return f"lognormal:{self.median:g},{self.sigma:g},{self.high}"
        return str(self.low) if self.low == self.high else f"{self.low}-{self.high}"

    def draw(self, rng: Random) -> int:
        """One length."""
        if self.median is None:
            return rng.randint(self.low, self.high)
        return max(self.low, min(self.high, round(self.median * rng.lognormvariate(0.0, self.sigma))))


_LOGNORMAL = re.compile(r"lognormal:(\d+),(\d+(?:\.\d+)?)(?:,(\d+))?")


def parse_lengths(option: str, text: str) -> Lengths:
    """`128`, `64-512` (uniform) or `lognormal:MEDIAN,SIGMA[,MAX]`. Raises `BadPlan`."""
    allowed = (
        f"{option}: found {text!r}; allowed: N, LOW-HIGH, or lognormal:MEDIAN,SIGMA[,MAX]; from 1 to {TOKENS_MAX}"
    )
    if match := re.fullmatch(r"(\d{1,9})(?:-(\d{1,9}))?", text):
        low, high = int(match[1]), int(match[2] or match[1])
        lengths = Lengths(low, high)
    elif match := _LOGNORMAL.fullmatch(text):
        median, sigma = int(match[1]), float(match[2])
        lengths = Lengths(1, int(match[3] or min(TOKENS_MAX, median * 20)), median, sigma)
    else:
        raise BadPlan(allowed)
    if not 1 <= lengths.low <= lengths.high <= TOKENS_MAX or lengths.sigma > 5:
        raise BadPlan(allowed)
    return lengths


@dataclass(frozen=True, slots=True)
class Plan:
    """The options of a run. `rate` None: `concurrency` clients, each sends its next request after a response."""

    url: str
    model: str | None
    task: str
    concurrency: int
    rate: float | None
    requests: int | None
    duration_s: float | None
    warmup: int
    prompt_tokens: str
    output_tokens: str
    stream: bool
    fixed_output: bool
    batch: int
    seed: int
    timeout_s: float
    api_key: str | None = None
    ca: Path | None = None
    headers: tuple[str, ...] = ()
    """`NAME:VALUE`, sent with every request."""
    temperature: float | None = None
    """None: the server's default."""


@dataclass(frozen=True, slots=True)
class Recipe:
    """A validated run: every option checked, every default applied."""

    target: "Target"
    model: str
    kind: Kind
    concurrency: int
    rate: float | None
    requests: int
    duration_s: float
    warmup: int
    prompt: Lengths
    output: Lengths
    stream: bool
    fixed_output: bool
    batch: int
    seed: int
    timeout_s: float
    api_key: str | None
    headers: tuple[tuple[str, str], ...]
    temperature: float | None


def recipe(plan: Plan) -> Recipe:
    """Validate the plan; the model may still be empty. Raises `BadPlan`."""
    if plan.task not in list(Kind):
        raise BadPlan(f"--task: found {plan.task!r}; allowed: {', '.join(Kind)}")
    bounds: tuple[tuple[str, float | None, float, float], ...] = (
        ("--concurrency", plan.concurrency, 1, CONCURRENCY_MAX),
        ("--rate", plan.rate, 0.001, RATE_MAX),
        ("--requests", plan.requests, 1, REQUESTS_MAX),
        ("--duration", plan.duration_s, 0.1, DURATION_S_MAX),
        ("--warmup", plan.warmup, 0, REQUESTS_MAX),
        ("--batch", plan.batch, 1, BATCH_MAX),
        ("--timeout", plan.timeout_s, 0.1, DURATION_S_MAX),
        ("--temperature", plan.temperature, 0, TEMPERATURE_MAX),
    )
    for option, value, low, high in bounds:
        if value is not None and not low <= value <= high:
            raise BadPlan(f"{option}: found {value:g}; allowed: from {low:g} to {high:,.10g}")
    if plan.api_key and not (plan.api_key.isascii() and plan.api_key.isprintable()):
        raise BadPlan("--api-key: found a character that no HTTP header can hold; allowed: printable ASCII")
    if len(plan.headers) > HEADERS_MAX:
        raise BadPlan(f"--header: found {len(plan.headers)}; allowed: at most {HEADERS_MAX}")
    kind = Kind(plan.task)
    if plan.batch > 1 and kind is not Kind.EMBED:
        raise BadPlan(f"--batch: found {plan.batch} with --task {kind}; allowed: 1, more only with --task embed")
    return Recipe(
        target=parse_url(plan.url),
        model=plan.model or "",
        kind=kind,
        concurrency=plan.concurrency,
        rate=plan.rate,
        requests=plan.requests or (REQUESTS_MAX if plan.duration_s else REQUESTS_DEFAULT),
        duration_s=plan.duration_s or DURATION_S_MAX,
        warmup=plan.warmup,
        prompt=parse_lengths("--prompt-tokens", plan.prompt_tokens),
        output=parse_lengths("--output-tokens", plan.output_tokens),
        stream=plan.stream and kind is not Kind.EMBED,
        fixed_output=plan.fixed_output,
        batch=plan.batch,
        seed=plan.seed,
        timeout_s=plan.timeout_s,
        api_key=plan.api_key,
        headers=tuple(map(parse_header, plan.headers)),
        temperature=plan.temperature,
    )


@dataclass(frozen=True, slots=True)
class Target:
    """Where requests go, taken from a base URL such as `http://127.0.0.1:8080/v1`."""

    host: str
    port: int
    path: str
    scheme: str = "http"

    @property
    def url(self) -> str:
        """The base URL."""
        return f"{self.scheme}://{self.authority}{self.path}"

    @property
    def authority(self) -> str:
        """The value of the Host header."""
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


def parse_url(url: str) -> Target:
    """The target of a base URL; `/v1` is added if it has no path. Raises `BadPlan`."""
    try:
        parts = urlsplit(url if "://" in url else f"http://{url}")
        host, port = parts.hostname, parts.port or (443 if parts.scheme == "https" else 80)
    except ValueError as error:
        raise BadPlan(f"--url: found {url!r} ({error}); allowed: http[s]://HOST:PORT[/v1]") from error
    plain = url.isascii() and url.isprintable() and " " not in url
    if parts.scheme not in ("http", "https") or not host or not plain:
        raise BadPlan(f"--url: found {url!r}; allowed: http[s]://HOST:PORT[/v1]")
    return Target(host, port, parts.path.rstrip("/") or "/v1", parts.scheme)


_HEADER = re.compile(r"([!#$%&'*+.^_`|~0-9A-Za-z-]+):[ \t]*([\x21-\x7e](?:[\t\x20-\x7e]*[\x21-\x7e])?)?[ \t]*")
"""A token, a colon, printable ASCII (RFC 9110, section 5)."""
OWN_HEADERS = frozenset(
    {"accept", "authorization", "connection", "content-length", "content-type", "host", "transfer-encoding"}
)
"""Headers that every request has already."""


def parse_header(text: str) -> tuple[str, str]:
    """`NAME:VALUE` as a name in lower case and its value. Raises `BadPlan`."""
    match = _HEADER.fullmatch(text)
    if match is None:
        raise BadPlan(f"--header: found {text!r}; allowed: NAME:VALUE, printable ASCII")
    name = match[1].lower()
    if name in OWN_HEADERS:
        raise BadPlan(f"--header: found {name!r}; allowed: any but {', '.join(sorted(OWN_HEADERS))}")
    return name, match[2] or ""


def arrivals(rate: float, rng: Random) -> Iterator[float]:
    """Seconds from the start at which requests are due: a Poisson process."""
    at = 0.0
    while True:
        at += rng.expovariate(rate)
        yield at


def prompt(number: int, tokens: int, rng: Random) -> str:
    """A text of about `tokens` tokens. It starts with the number, so that no two share a cacheable prefix."""
    words = [f"{number}:", *rng.choices(WORDS, k=max(0, tokens - 3))]
    return " ".join(words)


def body(plan: Recipe, number: int, rng: Random) -> bytes:
    """The JSON document of one request."""
    texts = [prompt(number * plan.batch + i, plan.prompt.draw(rng), rng) for i in range(plan.batch)]
    if plan.kind is Kind.EMBED:
        # OpenAI's client asks for base64 by default
        return msgspec.json.encode({"model": plan.model, "input": texts, "encoding_format": "base64"})
    document: dict[str, object] = {"model": plan.model, "max_tokens": plan.output.draw(rng)}
    if plan.kind is Kind.CHAT:
        document["messages"] = [{"role": "user", "content": texts[0]}]
    else:
        document["prompt"] = texts[0]
    if plan.stream:
        document |= {"stream": True, "stream_options": {"include_usage": True}}
    if plan.fixed_output:
        document["ignore_eos"] = True
    if plan.temperature is not None:
        document["temperature"] = plan.temperature
    return msgspec.json.encode(document)


def request_bytes(plan: Recipe, content: bytes) -> bytes:
    """Head and body of one HTTP request."""
    key = f"authorization: Bearer {plan.api_key}\r\n" if plan.api_key else ""
    own = "".join(f"{name}: {value}\r\n" for name, value in plan.headers)
    head = (
        f"POST {plan.target.path}{PATHS[plan.kind]} HTTP/1.1\r\nhost: {plan.target.authority}\r\n{key}{own}"
        f"content-type: application/json\r\naccept: */*\r\ncontent-length: {len(content)}\r\n\r\n"
    )
    return head.encode("latin-1") + content
