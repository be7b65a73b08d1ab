"""Scoring of answers, 0..1: golden sets with their scorers, and the prompts and replies of a judge model.

A golden set is a file of JSON lines, each a case: `id`, `request` (the body of a chat request without `model`),
`scorer`, and what that scorer compares with.
"""

import math
import re
import unicodedata
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Final, NamedTuple, TypeGuard

import msgspec

GOLDEN_BYTES_MAX: Final = 4 * 1024 * 1024
CASES_MAX: Final = 5_000
PROBLEMS_MAX: Final = 100
TEXT_CHARS_MAX: Final = 8192
"""Longest text of an answer that scorers see."""
GRADE_MAX: Final = 10
EDGES: Final = " .,;:!?…\"'`*_()[]{}<>«»“”‘’"  # noqa: RUF001 - as models write them
"""Punctuation stripped from exact answers. Signs and units stay: -5 is not 5, and 5 % is not 5."""
BROKEN: Final = (msgspec.DecodeError, UnicodeError, RecursionError)
"""Exceptions raised for text that is not JSON."""


class Scorer(StrEnum):
    """How an answer is scored against its case."""

    EXACT = "exact"
    """It equals one of `expected`, ignoring case, width of whitespace, and surrounding punctuation."""
    REGEX = "regex"
    """The `pattern` is found anywhere in it."""
    JSON_SCHEMA = "json_schema"
    """All of it is JSON that conforms to the `schema`."""
    SIMILARITY = "similarity"
    """Cosine similarity of its embedding and that of the `reference`."""
    JUDGE = "judge"
    """A judge model's grade, given the `reference`."""


BESIDE: Final = {
    Scorer.EXACT: "expected",
    Scorer.REGEX: "pattern",
    Scorer.JSON_SCHEMA: "schema",
    Scorer.SIMILARITY: "reference",
    Scorer.JUDGE: "reference",
}
"""The field that a case of each scorer needs."""
OURS: Final = ("model", "stream", "n")
"""Fields of a request that a case cannot set."""


@dataclass(frozen=True, slots=True)
class Case:
    """A question, and how its answer is scored; fields of other scorers are empty."""

    id: str
    request: Mapping[str, object]
    scorer: Scorer
    expected: tuple[str, ...] = ()
    pattern: str = ""
    schema: object = None
    reference: str = ""

    @property
    def question(self) -> str:
        """The text of the last message."""
        messages = self.request["messages"]
        last = messages[-1] if isinstance(messages, list) else None
        content = last.get("content") if isinstance(last, dict) else None
        if isinstance(content, list):
            return "\n".join(str(part.get("text", "")) for part in content if isinstance(part, dict))
        return str(content or "")


class Golden(NamedTuple):
    """A golden set. If there are problems, it cannot be used."""

    cases: tuple[Case, ...]
    problems: tuple[str, ...]


def golden_of(text: bytes) -> Golden:
    """Parse a file. Problems are listed with their lines, up to `PROBLEMS_MAX`."""
    if len(text) > GOLDEN_BYTES_MAX:
        return Golden((), (f"{len(text)} bytes; at most {GOLDEN_BYTES_MAX} are allowed",))
    cases: list[Case] = []
    problems: list[str] = []
    lines: dict[str, int] = {}
    for number, line in enumerate(text.splitlines(), 1):
        if not line.strip():
            continue
        entry = _entry(line)
        found = ["not a JSON object"] if entry is None else list(_mistakes(entry))
        if entry is not None and not found:
            case = _case(entry)
            if case.id in lines:
                found = [f'duplicate id "{case.id}", first on line {lines[case.id]}']
            lines.setdefault(case.id, number)
            cases.append(case)
        problems += [f"line {number}: {problem}" for problem in found]
    if len(cases) > CASES_MAX:
        problems.append(f"{len(cases)} cases; at most {CASES_MAX} are allowed")
    if not cases and not problems:
        problems.append("no cases")
    return Golden(tuple(cases), tuple(problems[:PROBLEMS_MAX]))


def score(case: Case, answer: str) -> float | None:
    """The answer's score; None: another model is needed to score it."""
    answer = answer[:TEXT_CHARS_MAX]
    match case.scorer:
        case Scorer.EXACT:
            return float(plain(answer) in {plain(expected) for expected in case.expected})
        case Scorer.REGEX:
            return float(re.search(case.pattern, answer) is not None)
        case Scorer.JSON_SCHEMA:
            return float(follows(answer, case.schema))
        case _:
            return None


def plain(text: str) -> str:
    """The normalised form in which exact answers are compared."""
    return " ".join(unicodedata.normalize("NFKC", text).casefold().split()).strip(EDGES)


def is_json(answer: str) -> bool:
    """Whether all of an answer is JSON."""
    try:
        msgspec.json.decode(answer)
    except BROKEN:
        return False
    return True


def follows(answer: str, schema: object) -> bool:
    """Whether all of an answer is JSON that conforms to a schema. The schema is trusted, as validation may never
    end."""
    import jsonschema  # takes longer to import than the rest of control, and is rarely needed
    import referencing

    if not is_json(answer) or not isinstance(schema, dict | bool):
        return False
    validator = jsonschema.Draft202012Validator(schema, registry=referencing.Registry())
    try:
        return bool(validator.is_valid(msgspec.json.decode(answer)))
    except (referencing.exceptions.Unresolvable, RecursionError, OverflowError):  # the last from huge numbers
        return False


def cosine(one: Sequence[float], other: Sequence[float]) -> float | None:
    """Cosine similarity, 0 (orthogonal or opposite) to 1; None: not comparable."""
    if len(one) != len(other):
        return None
    dot = math.fsum(a * b for a, b in zip(one, other, strict=True))
    size = math.sqrt(math.fsum(a * a for a in one)) * math.sqrt(math.fsum(b * b for b in other))
    found = dot / size if size > 0 else math.nan
    return min(1.0, max(0.0, found)) if math.isfinite(found) else None


def alike(stable: Sequence[Sequence[float]], canary: Sequence[Sequence[float]]) -> float:
    """Mean cosine similarity of the vectors that two revisions made of the same texts (at least one), 0..1.

    0 if they differ in number or length: stored vectors of one could not be used with the other.
    """
    if len(stable) != len(canary):
        return 0.0
    pairs = zip(stable, canary, strict=True)
    return math.fsum(1.0 if one == other else cosine(one, other) or 0.0 for one, other in pairs) / len(stable)


def grading(question: str, reference: str, answer: str) -> str:
    """The judge's prompt for grading one answer."""
    return (
        f"Grade an answer. Question:\n{question}\n\nReference answer:\n{reference}\n\nAnswer to grade:\n"
        f"{answer[:TEXT_CHARS_MAX]}\n\nReply with one whole number from 0 (it contradicts the reference, or says "
        f"nothing) to {GRADE_MAX} (it says the same), and with nothing else."
    )


def grade_of(reply: str) -> float | None:
    """The score in a judge's reply to `grading`; None: it contains no grade."""
    numbers = re.findall(r"-?\d+(?:\.\d+)?", reply.replace(f"/{GRADE_MAX}", ""))
    grade = float(numbers[0]) if len(numbers) == 1 else math.nan
    return grade / GRADE_MAX if 0 <= grade <= GRADE_MAX else None


def comparing(question: str, first: str, second: str) -> str:
    """The judge's prompt for comparing two answers."""
    return (
        f"Compare two answers. Question:\n{question}\n\nAnswer A:\n{first[:TEXT_CHARS_MAX]}\n\nAnswer B:\n"
        f"{second[:TEXT_CHARS_MAX]}\n\nWhich answer is better? Reply with one word, A, B or TIE, and nothing else."
    )


def preferred(reply: str) -> int | None:
    """1: the first answer, -1: the second, 0: neither; None: the reply names none of them, or several."""
    named = set(re.findall(r"\b(?:A|B|TIE)\b", re.sub(r"(?i)\btie\b", "TIE", reply)))
    return {"A": 1, "B": -1, "TIE": 0}[named.pop()] if len(named) == 1 else None


def preference(canary_second: int | None, canary_first: int | None) -> float | None:
    """How much better the canary's answer is, -1..1, from both orders, which cancels the judge's position bias."""
    if canary_second is None or canary_first is None:
        return None
    return (canary_first - canary_second) / 2


def _entry(line: bytes) -> dict[str, object] | None:
    try:
        return msgspec.json.decode(line, type=dict[str, object])
    except BROKEN:
        return None


def _mistakes(entry: Mapping[str, object]) -> Iterator[str]:
    """What is wrong with a case."""
    scorer = entry.get("scorer")
    if not _is_text(entry.get("id")):
        yield "`id` is missing, or not a string"
    yield from _request_mistakes(entry.get("request"))
    if not (isinstance(scorer, str) and scorer in set(Scorer)):
        yield f"`scorer` must be one of {', '.join(Scorer)}"
        return
    beside = BESIDE[Scorer(scorer)]
    for key in sorted(entry.keys() - {"id", "request", "scorer", beside}):
        yield f"unknown key `{key}`: a case with scorer {scorer} has id, request, scorer and {beside}"
    problem = _beside_mistake(Scorer(scorer), entry.get(beside))
    if problem:
        yield f"`{beside}`: {problem}"


def _request_mistakes(request: object) -> Iterator[str]:
    if not isinstance(request, dict):
        yield "`request` is missing, or not an object"
        return
    messages = request.get("messages")
    if not isinstance(messages, list) or not messages or not all(isinstance(each, dict) for each in messages):
        yield "`request.messages` must be a non-empty list of messages"
    for key in OURS:
        if key in request:
            yield f"`request.{key}` cannot be set by a case"


def _beside_mistake(scorer: Scorer, value: object) -> str:
    """What is wrong with the scorer's field; empty: nothing."""
    match scorer:
        case Scorer.EXACT:
            fine = _is_text(value) or (isinstance(value, list) and value and all(_is_text(each) for each in value))
            return "" if fine else "must be a string, or a list of accepted strings"
        case Scorer.JSON_SCHEMA:
            return _schema_mistake(value)
    if not _is_text(value):
        return "must be a non-empty string"
    if scorer is Scorer.REGEX:
        try:
            re.compile(value)
        except re.error as error:
            return f"not a valid regular expression: {error}"
    return ""


def _schema_mistake(value: object) -> str:
    import jsonschema  # see above

    if not isinstance(value, dict):
        return "must be an object"
    try:
        jsonschema.Draft202012Validator.check_schema(value)
    except jsonschema.SchemaError as error:
        return f"not a valid JSON schema: {error.message}"
    return ""


def _case(entry: Mapping[str, object]) -> Case:
    """The case that an entry without mistakes is."""
    request, expected = entry["request"], entry.get("expected", ())
    assert isinstance(request, dict)
    assert isinstance(expected, str | list | tuple)
    return Case(
        id=str(entry["id"]),
        request=request,
        scorer=Scorer(str(entry["scorer"])),
        expected=(expected,) if isinstance(expected, str) else tuple(str(each) for each in expected),
        pattern=str(entry.get("pattern", "")),
        schema=entry.get("schema"),
        reference=str(entry.get("reference", "")),
    )


def _is_text(value: object) -> TypeGuard[str]:
    return isinstance(value, str) and bool(value.strip())
