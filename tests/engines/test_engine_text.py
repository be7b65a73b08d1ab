"""Token bytes to text, stop strings, chat templates, and what is refused before an engine sees it."""

import json
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from forebay.core.errors import Code, Refusal
from forebay.engines.protocol import Delta, Sampling, TokenLogprob
from forebay.engines.sampling import (
    answer_tokens_max,
    check_said,
    check_sampling,
    check_spelling,
    check_text,
    check_tokens,
    resumable,
)
from forebay.engines.text import AnswerText, render_chat, token_logprob

CHATML = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


def said(
    pieces: list[bytes], stops: tuple[str, ...] = (), logprobs: bool = False, before: str = ""
) -> tuple[list[Delta], AnswerText]:
    text, deltas = AnswerText("a", stops, before, 100 if before else 0), []
    for piece in pieces:
        deltas.append(text.push(piece, token_logprob(piece, -1.0) if logprobs else None))
        if text.stopped:
            break
    else:
        deltas.append(text.end())
    return [each for each in deltas if each is not None], text


def joined(deltas: list[Delta]) -> str:
    return "".join(each.text for each in deltas)


def cut(data: bytes, places: list[int]) -> list[bytes]:
    marks = sorted({0, len(data), *(place % (len(data) + 1) for place in places)})
    return [data[a:b] for a, b in pairwise(marks)]


def first_complete_stop(text: str, stops: list[str]) -> str:
    """The plain meaning: reading on character by character, end before the stop string that is complete first."""
    for end in range(len(text) + 1):
        ending = [stop for stop in stops if text[:end].endswith(stop)]
        if ending:
            return text[: end - max(map(len, ending))]
    return text


@given(st.text(), st.lists(st.integers(0, 500)))
def test_text_is_the_same_however_its_bytes_are_cut(text: str, places: list[int]) -> None:
    deltas, _ = said(cut(text.encode(), places))
    assert joined(deltas) == text


@given(st.binary(), st.lists(st.integers(0, 500)))
def test_invalid_bytes_become_replacement_characters_and_never_half_a_character(
    data: bytes, places: list[int]
) -> None:
    deltas, _ = said(cut(data, places))
    assert joined(deltas) == data.decode("utf-8", "replace")


@given(st.text("abc", max_size=30), st.lists(st.text("abc", min_size=1, max_size=4), max_size=3), st.data())
def test_stop_strings_end_the_text_however_it_is_cut(text: str, stops: list[str], data: st.DataObject) -> None:
    deltas, answer = said(cut(text.encode(), data.draw(st.lists(st.integers(0, 30)))), tuple(stops))
    expected = first_complete_stop(text, stops)
    assert joined(deltas) == expected
    assert answer.stopped == (expected != text)


def test_text_that_may_begin_a_stop_string_is_held_until_that_is_decided() -> None:
    text = AnswerText("a", ("\n\nUser:",))
    assert text.push(b"Hello") == Delta("a", "Hello", 1)
    assert text.push(b"\n") is None
    assert text.push(b"\n") is None
    assert text.push(b"Us") is None
    assert text.push(b"ually") == Delta("a", "\n\nUsually", 4)
    assert text.push(b".\n\nUser") is None  # only whole tokens are let out
    assert text.push(b": more") == Delta("a", ".", 2)
    assert text.stopped


@given(st.text("ab é🌊", max_size=20), st.lists(st.text("ab é", min_size=1, max_size=3), max_size=2), st.data())
def test_wherever_an_answer_breaks_off_whole_tokens_were_sent(
    text: str, stops: list[str], data: st.DataObject
) -> None:
    pieces = cut(text.encode(), data.draw(st.lists(st.integers(0, 60))))
    answer, sent, ends = AnswerText("a", stops), "", {""}
    for count, piece in enumerate(pieces, 1):
        delta = answer.push(piece)
        ends.add(b"".join(pieces[:count]).decode("utf-8", "ignore"))
        if answer.stopped:
            return
        sent += delta.text if delta is not None else ""
        assert sent in ends


@given(st.text("abc", max_size=30), st.lists(st.text("abc", min_size=1, max_size=4), max_size=3), st.data())
def test_what_was_said_before_is_not_said_again_but_a_stop_string_may_begin_in_it(
    text: str, stops: list[str], data: st.DataObject
) -> None:
    expected = first_complete_stop(text, stops)
    begun = [end for end in range(len(text) + 1) if first_complete_stop(text[:end], stops) == text[:end]]
    seam = data.draw(st.sampled_from(begun))
    pieces = cut(text[seam:].encode(), data.draw(st.lists(st.integers(0, 30))))
    deltas, answer = said(pieces, tuple(stops), before=text[:seam])
    assert joined(deltas) == expected[seam:]
    assert answer.stopped == (expected != text)


def test_only_new_tokens_are_in_deltas_and_all_are_in_the_count() -> None:
    deltas, text = said([b"User", b" x", b": y"], ("\n\nUser:",), logprobs=True, before="Hi\n\n")
    assert joined(deltas) == "User x: y"
    assert sum(each.tokens for each in deltas) == 3
    assert text.tokens == 103
    assert [each.token for delta in deltas for each in delta.logprobs] == ["User", " x", ": y"]
    assert said([b"User", b": y"], ("\n\nUser:",), before="Hi\n\n")[0] == []


def test_a_stop_string_that_was_sent_whole_is_over() -> None:
    deltas, text = said([b"c", b"b"], ("ab", "abcabc"), before="ab")
    assert (joined(deltas), text.stopped) == ("cb", False)


def test_every_token_is_counted_and_has_its_logprob_once() -> None:
    pieces = [b"A", b"\xf0\x9f", b"\x8c\x8a", b" x", b"\xe2\x82"]
    deltas, text = said(pieces, ("zzz",), logprobs=True)
    assert joined(deltas) == "A🌊 x\ufffd"
    assert sum(each.tokens for each in deltas) == text.tokens == 5
    assert [bytes(each.bytes) for delta in deltas for each in delta.logprobs] == pieces


def test_tokens_of_a_stop_string_have_no_logprobs() -> None:
    deltas, _ = said([b"Hi", b" the", b"re", b" E", b"ND"], ("END",), logprobs=True)
    assert joined(deltas) == "Hi there "
    assert [each.token for delta in deltas for each in delta.logprobs] == ["Hi", " the", "re", " E"]


def test_logprobs_of_tokens_without_text_are_not_lost_at_the_end() -> None:
    deltas, _ = said([b"a", b""], logprobs=True)
    assert deltas[-1] == Delta("a", "", 1, (TokenLogprob("", -1.0, ()),))


def test_a_conversation_is_rendered_up_to_the_turn_of_the_assistant() -> None:
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi <|im_end|> & 'you'"}]
    assert render_chat(CHATML, messages, {}) == (
        "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nHi <|im_end|> & 'you'<|im_end|>\n"
        "<|im_start|>assistant\n"
    )


def test_templates_have_what_transformers_gives_them() -> None:
    template = (
        "{{ bos_token }}{% for m in messages %}\n"
        "    {% if loop.index > 1 %}{% break %}{% endif %}\n"
        "{{ m | tojson }}{% endfor %}{{ strftime_now('%Y')|length }}"
    )
    messages = [{"role": "user", "content": "é<b>"}, {"role": "user", "content": "not this"}]
    assert render_chat(template, messages, {"bos_token": "<s>"}) == '<s>{"role": "user", "content": "é<b>"}4'


@pytest.mark.parametrize(
    ("template", "code"),
    [
        ("{{ raise_exception('roles must alternate') }}", Code.INVALID_REQUEST),
        ("{{ messages[7]['content'] + 'x' }}", Code.INVALID_REQUEST),
        ("{{ messages.append(1) }}", Code.INVALID_REQUEST),
        ("{{ ''.__class__.__mro__ }}", Code.INVALID_REQUEST),
        ("{% for i in range(10**9) %}{% endfor %}", Code.INVALID_REQUEST),
        ("{% if %}", Code.INTERNAL),
    ],
)
def test_a_template_that_refuses_or_misbehaves_is_an_error_of_the_request(template: str, code: Code) -> None:
    with pytest.raises(Refusal) as caught:
        render_chat(template, [{"role": "user", "content": "x"}], {})
    assert caught.value.code is code


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("top_k", 0),
        ("min_p", 1.5),
        ("repetition_penalty", 0.0),
        ("logprobs", 21),
        ("top_p", float("nan")),
        ("stop", ("x",) * 17),
        ("stop", ("x" * 2000,)),
    ],
)
def test_values_out_of_range_are_refused_by_name(field: str, value: Any) -> None:
    with pytest.raises(Refusal) as caught:
        check_sampling(Sampling(**{field: value}), (field,))
    assert (caught.value.code, caught.value.param) == (Code.INVALID_REQUEST, field)


@pytest.mark.parametrize(
    ("sampling", "param"),
    [
        (Sampling(seed=1), "seed"),
        (Sampling(logprobs=0), "logprobs"),
        (Sampling(frequency_penalty=0.1), "frequency_penalty"),
        (Sampling(schema="{}"), "response_format"),
        (Sampling(ignore_eos=True), "ignore_eos"),
    ],
)
def test_fields_that_an_engine_does_not_honour_are_refused_by_name(sampling: Sampling, param: str) -> None:
    with pytest.raises(Refusal) as caught:
        check_sampling(sampling, ())
    assert (caught.value.code, caught.value.param) == (Code.UNSUPPORTED_PARAMETER, param)


@pytest.mark.parametrize("sampling", [Sampling(frequency_penalty=0.1), Sampling(presence_penalty=-1.0)])
def test_an_answer_under_penalties_goes_on_only_where_they_count_what_was_said(sampling: Sampling) -> None:
    check_said(sampling, counts_said=True)
    check_said(Sampling(repetition_penalty=1.2), counts_said=False)
    with pytest.raises(Refusal, match=r"_penalty`: it counts its own tokens only") as caught:
        check_said(sampling, counts_said=False)
    assert caught.value.code is Code.NOT_RESUMABLE
    assert resumable(sampling, counts_said=True)
    assert not resumable(sampling, counts_said=False)


def test_an_answer_under_a_schema_does_not_go_on_and_neither_does_one_that_is_spelt_otherwise() -> None:
    check_spelling("é", "é")
    with pytest.raises(Refusal) as caught:
        check_said(Sampling(schema="{}"), counts_said=True)
    assert (caught.value.code, caught.value.param) == (Code.NOT_RESUMABLE, "response_format")
    with pytest.raises(Refusal) as caught:
        check_spelling("<|end|>", "")
    assert caught.value.code is Code.NOT_RESUMABLE


def test_prompts_are_bounded_before_they_are_tokenised() -> None:
    check_text("word", 8, 100)
    for text in ("", "\ud800", "x" * 10_000):
        with pytest.raises(Refusal):
            check_text(text, 8, 100)
    with pytest.raises(Refusal, match="`said` has at least"):
        check_text("x" * 10_000, 8, 100, "said")


def test_a_token_id_that_is_none_is_named_with_its_place_and_the_models_range() -> None:
    check_tokens((0, 4), 5)
    for ids, id, at in (((-1,), -1, 0), ((1, 5), 5, 1), ((1, 2**70, 9), 2**70, 1)):
        with pytest.raises(Refusal, match=f"^.*: the prompt holds token id {id} at index {at}; .* 0 to 4$"):
            check_tokens(ids, 5)
    with pytest.raises(Refusal, match="the input is empty; it must have at least one token") as caught:
        check_tokens((), 5, "input")
    assert caught.value.param == "input"


def test_an_answer_that_does_not_fit_is_refused_with_the_numbers() -> None:
    assert answer_tokens_max(90, None, 100) == 10
    assert answer_tokens_max(90, 10, 100) == 10
    with pytest.raises(Refusal, match=r"90 tokens.*asks for 11.*100.*at most 10"):
        answer_tokens_max(90, 11, 100)
    with pytest.raises(Refusal, match=r"100 tokens.*takes 100") as caught:
        answer_tokens_max(100, None, 100)
    assert caught.value.param == "prompt"
    assert json.dumps(caught.value.code) == '"context_length_exceeded"'
