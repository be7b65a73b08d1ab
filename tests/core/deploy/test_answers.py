"""Cheap checks of an answer's text: refusals, empty answers, loops."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from forebay.core.deploy.answers import GRAM_CHARS, LOOP_TIMES, TAIL_CHARS, degenerate, refuses


@pytest.mark.parametrize(
    "text",
    [
        "I'm sorry, but I can't assist with that request.",
        "I\u2019m sorry, but I can\u2019t help with that.",
        "Sorry, I cannot do that.",
        "I am very sorry, I am unable to provide this.",
        "As an AI language model, I cannot provide medical advice.",
        "Unfortunately, I'm not able to share that.",
        "  I won't help you with this.",
        "I can not fulfill this request.",
        "I apologize, but I cannot directly answer this.",
        "I'M SORRY, BUT I CAN'T ASSIST",
    ],
)
def test_refusals_are_recognized_by_their_beginning(text: str) -> None:
    assert refuses(text)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "I can't wait to see it!",
        "Sorry for the delay. The answer is 4.",
        "The bridge can't support more than a ton.",
        "I can help with that.",
        "Here is a letter: I'm sorry, but I can't help you.",
        "It is 12 o'clock." + " So" * 200 + " I cannot help.",
    ],
)
def test_similar_phrases_are_not_refusals(text: str) -> None:
    assert not refuses(text)


@pytest.mark.parametrize(
    ("text", "broken"),
    [
        ("", True),
        (" \n\t", True),
        ("No.", False),
        ("ha " * 20, False),
        ("ha " * 200, True),
        ("The river flows to the mill, and " * 20, True),
        ("A good beginning. " + "日本の川は" * 60, True),
        ("\n".join(f"{n}. A line like the others, of the number {n}." for n in range(90)), False),
        ("| a | b | c |\n" * 3 + "The end.", False),
        ("word " * 400 + "And this is how the story ends: with something that was not said before.", False),
        ("Fine." + " " * TAIL_CHARS, True),
    ],
)
def test_empty_and_looping_answers_are_broken(text: str, broken: bool) -> None:
    assert degenerate(text) is broken


@given(st.text(min_size=1, max_size=200).filter(lambda text: bool(text.strip())), st.text(max_size=50))
def test_any_text_repeated_often_enough_at_the_end_is_a_loop(gram: str, before: str) -> None:
    times = LOOP_TIMES * (GRAM_CHARS // len(gram) + 2)
    assert degenerate(before + gram * times)


@given(st.text())
def test_any_text_is_handled(text: str) -> None:
    assert refuses(text) in (True, False)
    assert degenerate(text) == degenerate(text + " ")
