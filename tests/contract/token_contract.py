"""What every Engine must do about tokens: answer immediately, as its model tokenises, without state."""

import time

import pytest
from tests.contract.engine_contract import DRAIN_TIMEOUT_S, Subject, finished, sampling

from forebay.core.errors import Code, Refusal
from forebay.engines.protocol import Begun, Delta, Detokenize, Detokenized, Event, Tokenize, Tokenized


class TokenContract:
    """Fixture: `subject`, a loaded engine of any task, shared by the class."""

    def test_tokenize_returns_the_token_ids_of_the_model(self, subject: Subject) -> None:
        for text, ids in subject.token_ids.items():
            assert subject.engine.add(Tokenize("t", text), subject.now) == Tokenized("t", ids)
            plain = subject.engine.add(Tokenize("t", text, special=False), subject.now)
            assert isinstance(plain, Tokenized)
            assert f",{','.join(map(str, plain.tokens))}," in f",{','.join(map(str, ids))},"

    def test_detokenize_restores_the_text(self, subject: Subject) -> None:
        for text in (" the water", "a river runs to town", "\n"):
            ids = subject.engine.add(Tokenize("t", text, special=False), subject.now)
            assert isinstance(ids, Tokenized)
            if not ids.tokens:  # an embedding model may see nothing in white space
                continue
            again = subject.engine.add(Detokenize("t", ids.tokens), subject.now)
            assert isinstance(again, Detokenized)
            assert again.text.split() == text.split()
            if subject.info.task == "chat":
                assert again.text == text

    def test_tokenize_never_truncates_silently(self, subject: Subject) -> None:
        words = 2 * subject.info.context_tokens
        found: object
        try:
            found = subject.engine.add(Tokenize("t", "word " * words), subject.now)
        except Refusal as refusal:
            found = refusal.code
        whole = isinstance(found, Tokenized) and len(found.tokens) >= words
        assert whole or found is Code.CONTEXT_LENGTH_EXCEEDED

    def test_tokenize_keeps_no_state(self, subject: Subject) -> None:
        for _ in range(2):
            assert subject.engine.add(Tokenize("same id", "x"), subject.now) is not None
        subject.engine.cancel("same id")
        subject.assert_idle()

    def test_invalid_text_and_token_ids_are_rejected(self, subject: Subject) -> None:
        context = subject.info.context_tokens
        for work, code in (
            (Tokenize("t", ""), Code.INVALID_REQUEST),
            (Tokenize("t", "half a character: \ud83d"), Code.INVALID_REQUEST),
            (Tokenize("t", "word " * (100 * context)), Code.CONTEXT_LENGTH_EXCEEDED),
            (Detokenize("t", ()), Code.INVALID_REQUEST),
            (Detokenize("t", (0, -1)), Code.INVALID_REQUEST),
            (Detokenize("t", (0, subject.vocabulary)), Code.INVALID_REQUEST),
        ):
            with pytest.raises(Refusal) as caught:
                subject.engine.add(work, subject.now)
            assert (caught.value.code, caught.value.param in ("prompt", "input")) == (code, True), work
        subject.assert_idle()


class PromptContract:
    """Fixture: `subject`, a loaded engine that generates, shared by the class."""

    @pytest.mark.parametrize("prompt", [" the water", "a river runs to town " * 40])
    def test_begun_reports_prompt_tokens_once_before_any_text(self, subject: Subject, prompt: str) -> None:
        id = subject.generate(prompt, sampling(max_tokens=30))
        events: list[Event] = []
        deadline = time.monotonic() + DRAIN_TIMEOUT_S
        while sum(isinstance(event, Delta) for event in events) < 2:
            assert time.monotonic() < deadline, events
            step = subject.engine.step(subject.now)
            subject.now += step.wait_s or 0.0
            events += step.events
        subject.cancel(id)
        begun = [event for event in events if isinstance(event, Begun)]
        assert events[:1] == begun
        known = finished(subject.run(prompt, sampling(max_tokens=1)))
        assert (begun[0].id, begun[0].prompt_tokens) == (id, known.prompt_tokens)
        assert (begun[0].cached_tokens or 0) <= known.prompt_tokens
