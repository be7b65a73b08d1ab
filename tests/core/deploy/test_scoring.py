"""Scores of answers: golden sets, their scorers, and judges."""

import json
import math
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from forebay.core.deploy.scoring import (
    CASES_MAX,
    GOLDEN_BYTES_MAX,
    PROBLEMS_MAX,
    TEXT_CHARS_MAX,
    Case,
    Scorer,
    alike,
    comparing,
    cosine,
    follows,
    golden_of,
    grade_of,
    grading,
    is_json,
    plain,
    preference,
    preferred,
    score,
)

GOLDEN = Path(__file__).parents[2] / "e2e" / "rollouts" / "golden.jsonl"
REQUEST = {"messages": [{"role": "user", "content": "What is the capital of France?"}]}
CITY = {"type": "object", "properties": {"city": {"const": "Paris"}}, "required": ["city"]}
GOOD = {"id": "a", "request": REQUEST, "scorer": "exact", "expected": "Paris"}


def case(scorer: Scorer, **beside: object) -> Case:
    line = json.dumps({"id": "a", "request": REQUEST, "scorer": scorer, **beside})
    golden = golden_of(line.encode())
    assert golden.problems == ()
    return golden.cases[0]


def problems(**changes: object) -> list[str]:
    entry = {key: value for key, value in {**GOOD, **changes}.items() if value is not ...}
    return [problem.removeprefix("line 1: ") for problem in golden_of(json.dumps(entry).encode()).problems]


def test_demo_golden_set_is_valid() -> None:
    golden = golden_of(GOLDEN.read_bytes())
    assert golden.problems == ()
    assert len(golden.cases) >= 20


@pytest.mark.parametrize(
    ("answer", "worth"),
    [
        ("Paris", 1.0),
        ("  **PARIS**.\n", 1.0),
        ("paris", 1.0),
        ("It is Paris", 0.0),
        ("the   capital", 1.0),
        ("", 0.0),
        ("P" * 2 * TEXT_CHARS_MAX, 0.0),
    ],
)
def test_exact_scorer_ignores_case_and_surrounding_space_and_punctuation(answer: str, worth: float) -> None:
    assert score(case(Scorer.EXACT, expected=["Paris", "The capital"]), answer) == worth


def test_signs_and_units_are_not_punctuation() -> None:
    assert plain("-5.") == "-5" != plain("5")
    assert plain("5 %") != plain("5")
    assert plain("ﬁve") == plain("FIVE")


def test_pattern_matches_anywhere() -> None:
    found = case(Scorer.REGEX, pattern=r"\bParis\b")
    assert [score(found, text) for text in ("It is Paris!", "Parisian", "")] == [1.0, 0.0, 0.0]


@pytest.mark.parametrize(
    ("answer", "worth"),
    [('{"city": "Paris"}', 1.0), ('{"city": "Rome"}', 0.0), ('Sure: {"city": "Paris"}', 0.0), ("{}", 0.0)],
)
def test_all_of_an_answer_is_json_that_follows_the_schema(answer: str, worth: float) -> None:
    assert score(case(Scorer.JSON_SCHEMA, schema=CITY), answer) == worth


def test_number_that_is_too_large_to_divide_matches_nothing() -> None:
    assert not follows("1" + "0" * 400, {"multipleOf": 0.01})


def test_unresolvable_or_invalid_schema_matches_nothing() -> None:
    assert not follows("{}", {"$ref": "https://example.com/elsewhere.json"})
    assert not follows("{}", {"$ref": "#"})
    assert not follows("{}", 3)
    assert follows("{}", True)


@pytest.mark.parametrize(("text", "fine"), [("[1]", True), ("[1] and", False), ("NaN", False), ("\ud800", False)])
def test_is_json_accepts_exactly_valid_json(text: str, fine: bool) -> None:
    assert is_json(text) == fine


def test_judge_and_similarity_scorers_need_another_model() -> None:
    for scorer in (Scorer.JUDGE, Scorer.SIMILARITY):
        assert score(case(scorer, reference="Paris is."), "Paris") is None


@given(st.lists(st.floats(-1e3, 1e3), min_size=1, max_size=8), st.floats(0.1, 10))
def test_vector_similarity_is_the_cosine(vector: list[float], stretch: float) -> None:
    alike = cosine(vector, [stretch * each for each in vector])
    if math.fsum(each * each for each in vector) > 1e-100:
        assert alike == pytest.approx(1.0)
        assert cosine(vector, [-each for each in vector]) == 0.0


def test_incomparable_vectors_have_no_score() -> None:
    assert cosine([1.0], [1.0, 0.0]) is None
    assert cosine([0.0], [1.0]) is None
    assert cosine([math.inf], [1.0]) is None
    assert cosine([1.0, 0.0], [0.0, 1.0]) == 0.0


@pytest.mark.parametrize(
    ("stable", "canary", "value"),
    [
        ([[1.0, 0.0]], [[3.0, 0.0]], 1.0),
        ([[1.0, 0.0], [1.0, 0.0]], [[1.0, 0.0], [0.0, 1.0]], 0.5),
        ([[1.0, 0.0]], [[-1.0, 0.0]], 0.0),
        ([[0.0, 0.0]], [[0.0, 0.0]], 1.0),
        ([[1.0, 0.0]], [[0.0, 0.0]], 0.0),
        ([[1.0, 0.0]], [[1.0, 0.0, 0.0]], 0.0),
        ([[1.0], [1.0]], [[1.0]], 0.0),
        ([[1.0]], [], 0.0),
        ([[1.0]], [[math.nan]], 0.0),
    ],
)
def test_similarity_of_vectors_is_their_mean_cosine(
    stable: list[list[float]], canary: list[list[float]], value: float
) -> None:
    assert alike(stable, canary) == value


@pytest.mark.parametrize(
    ("reply", "grade"),
    [
        ("7", 0.7),
        (" 10/10 ", 1.0),
        ("Grade: 0.", 0.0),
        ("8.5", 0.85),
        ("11", None),
        ("-3", None),
        ("3 or 4", None),
        ("", None),
    ],
)
def test_grade_is_read_from_a_reply_with_exactly_one_number(reply: str, grade: float | None) -> None:
    assert grade_of(reply) == grade


@pytest.mark.parametrize(
    ("reply", "first"),
    [
        ("A", 1),
        ("Answer B.", -1),
        ("tie", 0),
        ("**TIE**", 0),
        ("A is better than B", None),
        ("both", None),
        ("a better one", None),
    ],
)
def test_preference_is_read_from_a_reply_that_names_one_answer(reply: str, first: int | None) -> None:
    assert preferred(reply) == first


def test_position_bias_of_a_judge_cancels_out() -> None:
    assert preference(1, 1) == preference(-1, -1) == preference(0, 0) == 0.0
    assert preference(-1, 1) == 1.0
    assert preference(1, -1) == -1.0
    assert preference(0, 1) == 0.5
    assert preference(None, 1) is preference(1, None) is None


def test_judge_prompts_contain_question_reference_and_answers() -> None:
    asked = grading("Why?", "Because.", "So.")
    assert all(part in asked for part in ("Why?", "Because.", "So."))
    asked = comparing("Why?", "x" * 2 * TEXT_CHARS_MAX, "So.")
    assert all(part in asked for part in ("Why?", "x" * TEXT_CHARS_MAX, "So."))
    assert "x" * (TEXT_CHARS_MAX + 1) not in asked


@pytest.mark.parametrize(
    ("content", "question"),
    [("Why?", "Why?"), ([{"type": "text", "text": "Why"}, {"type": "image_url"}, 3], "Why\n"), (None, "")],
)
def test_question_of_a_case_is_the_text_of_the_last_message(content: object, question: str) -> None:
    messages = [{"role": "user", "content": "Hi"}, {"role": "user", "content": content}]
    found = golden_of(json.dumps({**GOOD, "request": {"messages": messages}}).encode())
    assert found.cases[0].question == question


@pytest.mark.parametrize(
    ("changes", "found"),
    [
        ({"id": ...}, ["`id` is missing, or not a string"]),
        ({"request": 3}, ["`request` is missing, or not an object"]),
        ({"request": {"messages": []}}, ["`request.messages` must be a non-empty list of messages"]),
        ({"request": {**REQUEST, "model": "x", "n": 2}}, ["`request.model` cannot", "`request.n` cannot"]),
        (
            {"scorer": "vibes", "id": " "},
            ["`id` is", "`scorer` must be one of exact, regex, json_schema, similarity, judge"],
        ),
        ({"scorer": ["exact"]}, ["`scorer` must be one of"]),
        (
            {"pattern": "x", "answer": 3},
            ["unknown key `answer`: a case with scorer exact has", "unknown key `pattern`"],
        ),
        ({"expected": []}, ["`expected`: must be a string, or a list"]),
        ({"expected": ["a", 3]}, ["`expected`: must be a string, or a list"]),
        ({"scorer": "judge", "expected": ..., "reference": ""}, ["`reference`: must be a non-empty string"]),
        (
            {"scorer": "regex", "expected": ..., "pattern": "("},
            ["`pattern`: not a valid regular expression: missing )"],
        ),
        ({"scorer": "json_schema", "expected": ..., "schema": []}, ["`schema`: must be an object"]),
        (
            {"scorer": "json_schema", "expected": ..., "schema": {"type": 3}},
            ["`schema`: not a valid JSON schema: 3 is"],
        ),
    ],
)
def test_every_problem_of_a_case_is_named(changes: dict[str, object], found: list[str]) -> None:
    told = problems(**changes)
    assert [each[: len(start)] for each, start in zip(told, found, strict=True)] == found


def test_every_invalid_line_is_named_and_empty_ones_are_ignored() -> None:
    lines = [json.dumps(GOOD), "", "nonsense", json.dumps(GOOD), "[]", json.dumps({**GOOD, "id": "b"})]
    golden = golden_of("\n".join(lines).encode())
    assert golden.problems == (
        "line 3: not a JSON object",
        'line 4: duplicate id "a", first on line 1',
        "line 5: not a JSON object",
    )


def test_golden_set_exceeding_its_limits_is_rejected() -> None:
    assert golden_of(b"").problems == ("no cases",)
    assert "are allowed" in golden_of(b" " * (GOLDEN_BYTES_MAX + 1)).problems[0]
    assert len(golden_of(b"x\n" * 2 * PROBLEMS_MAX).problems) == PROBLEMS_MAX
    many = "\n".join(json.dumps({**GOOD, "id": str(n)}) for n in range(CASES_MAX + 1))
    assert golden_of(many.encode()).problems == (f"{CASES_MAX + 1} cases; at most {CASES_MAX} are allowed",)


@given(st.binary(max_size=200))
def test_any_file_content_is_handled(text: bytes) -> None:
    golden = golden_of(text)
    assert golden.cases or golden.problems
