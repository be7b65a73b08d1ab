"""What every generating engine must do with an output that another replica began."""

from typing import Any

import pytest
from tests.contract.engine_contract import GREEDY, Outcome, Subject, finished, sampling

from forebay.core.errors import Code, Refusal
from forebay.engines.protocol import Generate, Sampling

COUNTING = "1, 2, 3, 4,"
REPEATING = (COUNTING, 8 * "🌊🐟", " ".join(6 * ["日本"]))
"""What comes next is beyond doubt, so that an engine whose sums depend on the batch says it again too: to the token
that it takes, SmolLM2 gives six times the probability of any other. With half as many repetitions it was 1.4."""
PENALISED = ("Once upon a time", "The river", "def add(a, b):", "2 + 2 =", "A long time ago")
"""Answers of which none goes on as it did if the penalty leaves out what was said. With it all of them do, but for
some on some processors: text that is read at once is rounded differently from text that was generated."""
LONG = sampling(max_tokens=16, ignore_eos=True)


def resumed(subject: Subject, prompt: str, said: str, wanted: Sampling = GREEDY) -> Outcome:
    """An answer that goes on after `said`, alone."""
    id = subject.add(Generate(subject.id(), prompt, wanted, said))
    subject.drain()
    return subject.outcomes[id]


def resumed_or_refused(subject: Subject, prompt: str, said: str, wanted: Sampling) -> Outcome | Refusal:
    try:
        return resumed(subject, prompt, said, wanted)
    except Refusal as refusal:
        return refusal


def begun(subject: Subject, prompt: str, wanted: Sampling) -> tuple[list[str], Outcome]:
    """What a client has after each step of an answer but the last one, and the whole answer."""
    id = subject.generate(prompt, wanted)
    outcome, texts = subject.outcomes[id], [""]
    while not outcome.ended:
        if outcome.text != texts[-1]:
            texts.append(outcome.text)
        subject.step()
    subject.drain()
    return texts, outcome


class ResumeContract:
    """Fixture: `subject`, a loaded engine shared by the class."""

    @pytest.mark.parametrize("prompt", REPEATING)
    def test_resumed_output_continues_from_any_point(self, subject: Subject, prompt: str) -> None:
        subject.honours("ignore_eos")
        texts, whole = begun(subject, prompt, LONG)
        for text in texts[::2]:
            rest = resumed(subject, prompt, text, LONG)
            assert text + rest.text == whole.text, (text, rest.text, whole.text)
            assert finished(rest).reason == "length"
            assert finished(rest).prompt_tokens == finished(whole).prompt_tokens
            assert finished(rest).completion_tokens == 16
            assert rest.tokens <= 16 - bool(text)
        subject.assert_idle()

    @pytest.mark.parametrize("said", [" 5, 6,", " naïve 日本🌊", "\n"])
    def test_tokens_before_the_resume_count_as_generated(self, subject: Subject, said: str) -> None:
        subject.honours("ignore_eos")
        free = finished(resumed(subject, COUNTING, said, LONG))
        plain = finished(subject.run(COUNTING, LONG))
        assert free.prompt_tokens == plain.prompt_tokens
        assert free.completion_tokens == plain.completion_tokens == 16
        one_more = resumed(subject, COUNTING, said, sampling(max_tokens=1, ignore_eos=True))
        said_tokens = finished(one_more).completion_tokens
        assert (one_more.text, one_more.tokens, finished(one_more).reason) == ("", 0, "length")
        assert said_tokens >= 1
        for limit, new in ((said_tokens, 0), (said_tokens + 2, 2)):
            outcome = resumed(subject, COUNTING, said, sampling(max_tokens=limit, ignore_eos=True))
            assert (outcome.tokens, finished(outcome).completion_tokens) == (new, limit)
            assert finished(outcome).reason == "length"
        subject.assert_idle()

    def test_stop_string_is_found_across_the_resume_point(self, subject: Subject) -> None:
        subject.honours("ignore_eos")
        texts, whole = begun(subject, COUNTING, LONG)
        said = texts[len(texts) // 2]
        rest = whole.text.removeprefix(said)
        near = said[-2:] + "\u2603"
        across = resumed(subject, COUNTING, said, sampling(max_tokens=16, stop=(near, said[-3:] + rest[:2])))
        assert (across.text, finished(across).reason) == ("", "stop")
        beyond = resumed(subject, COUNTING, said, sampling(max_tokens=16, stop=(rest[3:6], near)))
        assert (beyond.text, finished(beyond).reason) == (rest[: rest.index(rest[3:6])], "stop")
        never = resumed(subject, COUNTING, said, sampling(max_tokens=16, ignore_eos=True, stop=(near,)))
        assert (never.text, finished(never).reason) == (rest, "length")

    @pytest.mark.parametrize("name", ["frequency_penalty", "presence_penalty", "repetition_penalty"])
    def test_penalty_counts_earlier_output_or_is_not_resumable(self, subject: Subject, name: str) -> None:
        subject.honours(name, "ignore_eos")
        wanted = sampling(max_tokens=16, ignore_eos=True, **{name: 2.0})
        texts, _ = begun(subject, "Once upon a time", wanted)
        rest = resumed_or_refused(subject, "Once upon a time", texts[5], wanted)
        if isinstance(rest, Refusal):
            assert (rest.code, rest.param) == (Code.NOT_RESUMABLE, name)
            assert name != "repetition_penalty", "it is about the prompt too, so any engine can do it"
            assert not subject.info.counts_said
        else:
            assert any(self._goes_on(subject, prompt, wanted) for prompt in PENALISED)
            assert subject.info.counts_said or name == "repetition_penalty"

    def _goes_on(self, subject: Subject, prompt: str, wanted: Sampling) -> bool:
        texts, whole = begun(subject, prompt, wanted)
        return texts[5] + resumed(subject, prompt, texts[5], wanted).text == whole.text

    def test_output_under_a_schema_resumes_only_from_its_start(self, subject: Subject) -> None:
        subject.honours("json_schema")
        wanted = sampling(max_tokens=40, schema='{"type": "object"}')
        refusal = subject.refuses(Generate(subject.id(), "As JSON: ", wanted, "{"))
        assert (refusal.code, refusal.param) == (Code.NOT_RESUMABLE, "response_format")
        assert resumed(subject, "As JSON: ", "", wanted).text.startswith("{")

    @pytest.mark.parametrize("changes", [{}, {"seed": 7}, {"seed": 7, "top_k": 5}], ids=str)
    def test_sampled_output_can_be_resumed(self, subject: Subject, changes: dict[str, Any]) -> None:
        subject.honours("ignore_eos", *changes)
        wanted = sampling(max_tokens=16, ignore_eos=True, temperature=1.0, **changes)
        texts, whole = begun(subject, "The river", wanted)
        rest = resumed(subject, "The river", texts[5], wanted)
        assert finished(rest).completion_tokens == 16
        if subject.batch_invariant and changes:
            assert texts[5] + rest.text == whole.text

    def test_logprobs_cover_only_new_tokens(self, subject: Subject) -> None:
        subject.honours("logprobs", "ignore_eos")
        wanted = sampling(max_tokens=16, ignore_eos=True, logprobs=0)
        texts, _ = begun(subject, COUNTING, wanted)
        rest = resumed(subject, COUNTING, texts[5], wanted)
        assert "".join(each.token for each in rest.logprobs) == rest.text
        assert len(rest.logprobs) == rest.tokens

    def test_resume_text_with_a_lone_surrogate_is_rejected(self, subject: Subject) -> None:
        refusal = subject.refuses(Generate(subject.id(), COUNTING, GREEDY, "half: \ud83d"))
        assert refusal.code is Code.INVALID_REQUEST
        subject.assert_idle()

    def test_resumed_request_can_be_cancelled_before_start_and_while_running(self, subject: Subject) -> None:
        works = [
            Generate(subject.id(), COUNTING, sampling(max_tokens=tokens, ignore_eos=True), " 5, 6,")
            for tokens in (1, 40, 40)
        ]
        for work in works:
            subject.add(work)
        subject.cancel(works[0].id)
        subject.cancel(works[1].id)
        subject.step_until("the last one speaks", lambda: subject.outcomes[works[2].id].deltas >= 1)
        subject.cancel(works[2].id)
        subject.assert_idle()
