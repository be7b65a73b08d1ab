"""What every Engine must do: one suite for generating engines, one for embedding engines."""

import json
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import jsonschema
import msgspec
import numpy as np
import pytest

from forebay.core.errors import Code, Refusal
from forebay.engines.protocol import (
    Delta,
    Embed,
    Embedded,
    Engine,
    EngineInfo,
    EngineLoad,
    Failed,
    Finished,
    Generate,
    Sampling,
    TokenLogprob,
    Work,
)

DRAIN_TIMEOUT_S = 100.0
GREEDY = Sampling(temperature=0.0, max_tokens=12)
PROMPTS = ("Once upon a time", "The capital of France is", "Water runs down the hill and", "1, 2, 3, 4,")
SCHEMA = {
    "type": "object",
    "properties": {"city": {"type": "string", "maxLength": 12}, "size": {"enum": ["small", "large"]}},
    "required": ["city", "size"],
    "additionalProperties": False,
}


@dataclass
class Outcome:
    """All events of one request."""

    text: str = ""
    tokens: int = 0
    deltas: int = 0
    logprobs: list[TokenLogprob] = field(default_factory=list)
    finished: Finished | None = None
    embedded: Embedded | None = None
    failed: Failed | None = None

    @property
    def ended(self) -> bool:
        return any((self.finished, self.embedded, self.failed))

    @property
    def vector(self) -> "np.ndarray[Any, Any]":
        assert self.embedded is not None
        return np.frombuffer(self.embedded.vector, "<f4")


@dataclass
class Subject:
    """A loaded engine under test and the driver of its loop."""

    engine: Engine
    info: EngineInfo
    token_ids: Mapping[str, tuple[int, ...]]
    """The token ids of a few texts."""
    vocabulary: int
    batch_invariant: bool = False
    """True: the same bytes whatever else is in the batch."""
    batch_cosine_min: float = 0.999
    """How alike the vectors of a text must be, alone and in any batch."""
    virtual_time: bool = True
    """False: the engine works in the background, so that waiting must really wait."""
    now: float = 1000.0
    outcomes: dict[str, Outcome] = field(default_factory=dict)
    cancelled: set[str] = field(default_factory=set)
    load: EngineLoad = field(default_factory=EngineLoad)
    made: int = 0

    def fresh(self) -> "Subject":
        """Forget the outcomes of earlier tests; what they left running is cancelled."""
        for id, outcome in self.outcomes.items():
            if not outcome.ended:
                self.engine.cancel(id)
        self.outcomes.clear()
        return self

    def close(self) -> None:
        self.engine.close()

    def id(self) -> str:
        self.made += 1
        return f"t-{self.made}"

    def add(self, work: Work) -> str:
        self.engine.add(work, self.now)
        self.outcomes[work.id] = Outcome()
        return work.id

    def generate(self, prompt: str | tuple[int, ...], sampling: Sampling = GREEDY) -> str:
        return self.add(Generate(self.id(), prompt, sampling))

    def embed(self, content: str | tuple[int, ...]) -> str:
        return self.add(Embed(self.id(), content))

    def cancel(self, id: str) -> None:
        self.engine.cancel(id)
        self.cancelled.add(id)

    def step(self) -> float | None:
        """One step, its events booked; then time passes as the engine asked."""
        result = self.engine.step(self.now)
        self.load = result.load
        for event in result.events:
            assert event.id not in self.cancelled, f"{event} after cancel"
            outcome = self.outcomes[event.id]
            assert not outcome.ended, f"{event} after the end"
            self._book(outcome, event)
        if result.wait_s:
            if not self.virtual_time:
                threading.Event().wait(min(result.wait_s, 0.05))
            self.now += result.wait_s
        return result.wait_s

    @staticmethod
    def _book(outcome: Outcome, event: object) -> None:
        match event:
            case Delta():
                event.text.encode()  # raises on half a character
                outcome.text += event.text
                outcome.tokens += event.tokens
                outcome.deltas += 1
                outcome.logprobs += event.logprobs
            case Finished():
                outcome.finished = event
            case Embedded():
                outcome.embedded = event
            case Failed():
                outcome.failed = event

    def step_until(self, what: str, reached: Callable[[], bool]) -> None:
        deadline = time.monotonic() + DRAIN_TIMEOUT_S
        while not reached():
            assert time.monotonic() < deadline, f"never: {what}"
            self.step()

    def drain(self) -> None:
        """Step until the engine is idle and every id that was not cancelled has ended."""
        deadline = time.monotonic() + DRAIN_TIMEOUT_S
        while self.step() is not None or not all(
            o.ended for id, o in self.outcomes.items() if id not in self.cancelled
        ):
            assert time.monotonic() < deadline, f"open: {[id for id, o in self.outcomes.items() if not o.ended]}"

    def run(self, prompt: str | tuple[int, ...], sampling: Sampling = GREEDY) -> Outcome:
        """One request alone."""
        id = self.generate(prompt, sampling)
        self.drain()
        return self.outcomes[id]

    def run_embed(self, content: str | tuple[int, ...]) -> Outcome:
        id = self.embed(content)
        self.drain()
        return self.outcomes[id]

    def assert_idle(self) -> None:
        self.drain()
        assert (self.load.running, self.load.waiting) == (0, 0)
        assert self.load.kv_used_tokens in {0, None}

    def refuses(self, work: Work) -> Refusal:
        with pytest.raises(Refusal) as caught:
            self.add(work)
        return caught.value

    def honours(self, *names: str) -> None:
        missing = [name for name in names if name not in self.info.honours]
        if missing:
            pytest.skip(f"{self.info.engine} says that it does not honour {', '.join(missing)}")


def sampling(**changes: Any) -> Sampling:
    return msgspec.structs.replace(GREEDY, **changes)


def finished(outcome: Outcome) -> Finished:
    assert outcome.failed is None
    assert outcome.finished is not None
    return outcome.finished


def cosine(one: Outcome, other: Outcome) -> float:
    a, b = one.vector, other.vector
    return float(a @ b / np.linalg.norm(a) / np.linalg.norm(b))


class GenerateContract:
    """Fixtures: `subject` (a loaded engine, shared by the class) and `small` (the same with `concurrency` 2)."""

    def test_info_has_what_the_worker_needs(self, subject: Subject) -> None:
        assert subject.info.task == "chat"
        assert subject.info.context_tokens > 0
        assert subject.info.concurrency > 0
        assert subject.info.version

    def test_greedy_output_is_deterministic(self, subject: Subject) -> None:
        first, second = (subject.run(PROMPTS[0]) for _ in range(2))
        assert first.text
        assert first.text == second.text

    def test_batched_output_equals_output_alone(self, subject: Subject) -> None:
        alone = [subject.run(prompt) for prompt in PROMPTS]
        ids = [subject.generate(prompt) for prompt in PROMPTS]
        subject.drain()
        for id, one in zip(ids, alone, strict=True):
            together = subject.outcomes[id]
            assert finished(together).prompt_tokens == finished(one).prompt_tokens
            if subject.batch_invariant:
                assert together.text == one.text
                assert finished(together).reason == finished(one).reason
        texts = {subject.outcomes[id].text for id in ids}
        assert len(texts) == len(ids), "answers were mixed up"

    def test_requests_join_and_leave_a_running_batch(self, subject: Subject) -> None:
        subject.honours("ignore_eos")
        long = subject.generate(PROMPTS[0], sampling(max_tokens=40, ignore_eos=True))
        subject.step_until("the long one speaks", lambda: subject.outcomes[long].deltas >= 2)
        short = subject.generate(PROMPTS[2], sampling(max_tokens=3, ignore_eos=True))
        subject.step_until("the short one ends", lambda: subject.outcomes[short].ended)
        assert not subject.outcomes[long].ended
        subject.drain()
        assert finished(subject.outcomes[long]).completion_tokens == 40
        assert finished(subject.outcomes[short]).completion_tokens == 3

    def test_cancelled_request_is_freed_and_emits_no_events(self, subject: Subject) -> None:
        gone, kept = (subject.generate(p, sampling(max_tokens=30)) for p in PROMPTS[:2])
        subject.step_until("the first speaks", lambda: subject.outcomes[gone].deltas >= 1)
        subject.cancel(gone)
        subject.drain()
        finished(subject.outcomes[kept])
        subject.assert_idle()

    def test_cancel_of_the_only_request_leaves_the_engine_idle(self, subject: Subject) -> None:
        id = subject.generate(PROMPTS[0], sampling(max_tokens=200))
        subject.step_until("it speaks", lambda: subject.outcomes[id].deltas >= 1)
        subject.cancel(id)
        subject.assert_idle()
        assert subject.run(PROMPTS[0]).text

    def test_cancel_of_an_unknown_or_ended_id_is_ignored(self, subject: Subject) -> None:
        subject.engine.cancel("never-seen")
        id = subject.generate(PROMPTS[0])
        subject.drain()
        subject.engine.cancel(id)
        subject.engine.cancel(id)
        assert subject.run(PROMPTS[0]).text == subject.outcomes[id].text

    def test_id_can_be_reused_after_its_end(self, subject: Subject) -> None:
        id = subject.generate(PROMPTS[0])
        subject.drain()
        subject.add(Generate(id, PROMPTS[0], GREEDY))
        subject.drain()
        assert subject.outcomes[id].text

    @pytest.mark.parametrize("length", [1, 4, 9])
    def test_stop_string_ends_the_output_and_is_not_included(self, subject: Subject, length: int) -> None:
        whole = subject.run(PROMPTS[0], sampling(max_tokens=24)).text
        middle = len(whole) // 2
        stop = whole[middle : middle + length]
        cut = subject.run(PROMPTS[0], sampling(max_tokens=24, stop=("\u2603 no such text", stop)))
        assert cut.text == whole[: whole.index(stop)]
        assert (finished(cut).reason, finished(cut).stop) == ("stop", stop)

    def test_partial_stop_string_match_is_not_lost(self, subject: Subject) -> None:
        whole = subject.run(PROMPTS[0])
        near = subject.run(PROMPTS[0], sampling(stop=(whole.text[-4:] + "\u2603", whole.text[:6] + "\u2603")))
        assert near.text == whole.text
        assert finished(near) == msgspec.structs.replace(
            finished(whole), id=finished(near).id, cached_tokens=finished(near).cached_tokens
        )

    @pytest.mark.parametrize("count", [1, 2, 7])
    def test_max_tokens_is_exact(self, subject: Subject, count: int) -> None:
        outcome = subject.run(PROMPTS[0], sampling(max_tokens=count))
        assert finished(outcome).completion_tokens == count
        assert finished(outcome).reason == "length"
        assert outcome.tokens == count

    def test_token_ids_and_text_give_the_same_output(self, subject: Subject) -> None:
        for text, ids in subject.token_ids.items():
            by_text, by_ids = subject.run(text), subject.run(ids)
            assert by_ids.text == by_text.text
            assert finished(by_ids).prompt_tokens == finished(by_text).prompt_tokens == len(ids)

    @pytest.mark.parametrize(
        "changes",
        [
            {"max_tokens": 0},
            {"max_tokens": -1},
            {"temperature": -0.1},
            {"temperature": float("nan")},
            {"temperature": float("inf")},
            {"top_p": 0.0},
            {"top_p": 1.5},
            {"frequency_penalty": 3.0},
            {"presence_penalty": float("nan")},
            {"stop": ("",)},
        ],
        ids=str,
    )
    def test_invalid_sampling_value_is_rejected_by_name(self, subject: Subject, changes: dict[str, Any]) -> None:
        refusal = subject.refuses(Generate(subject.id(), PROMPTS[0], sampling(**changes)))
        assert refusal.code is Code.INVALID_REQUEST
        assert refusal.param == next(iter(changes))
        assert subject.run(PROMPTS[0]).text

    def test_invalid_prompts_are_rejected(self, subject: Subject) -> None:
        context, ids = subject.info.context_tokens, next(iter(subject.token_ids.values()))
        cases: list[tuple[str | tuple[int, ...], Sampling, Code]] = [
            ("", GREEDY, Code.INVALID_REQUEST),
            ((), GREEDY, Code.INVALID_REQUEST),
            ((ids[0], -1), GREEDY, Code.INVALID_REQUEST),
            ((ids[0], subject.vocabulary), GREEDY, Code.INVALID_REQUEST),
            ("half a character: \ud83d", GREEDY, Code.INVALID_REQUEST),
            (ids[:1] * (context + 1), GREEDY, Code.CONTEXT_LENGTH_EXCEEDED),
            ("word " * (context + 1), GREEDY, Code.CONTEXT_LENGTH_EXCEEDED),
            (ids[:1] * 10, sampling(max_tokens=context), Code.CONTEXT_LENGTH_EXCEEDED),
        ]
        for prompt, wanted, code in cases:
            refusal = subject.refuses(Generate(subject.id(), prompt, wanted))
            assert refusal.code is code, (prompt[:20], refusal)
        assert subject.refuses(Embed(subject.id(), "x")).code is Code.WRONG_TASK
        assert subject.run(PROMPTS[0]).text
        subject.assert_idle()

    def test_invalid_schema_is_rejected(self, subject: Subject) -> None:
        subject.honours("json_schema")
        for schema in ("{", '{"type": "no such type"}', "[]"):
            refusal = subject.refuses(Generate(subject.id(), PROMPTS[0], sampling(schema=schema)))
            assert refusal.code is Code.INVALID_REQUEST
        assert subject.run(PROMPTS[0]).text

    def test_request_with_a_running_id_is_rejected(self, subject: Subject) -> None:
        id = subject.generate(PROMPTS[0], sampling(max_tokens=20))
        subject.step()
        assert subject.refuses(Generate(id, PROMPTS[1], GREEDY)).code is Code.INVALID_REQUEST
        subject.outcomes[id] = replace(subject.outcomes[id])
        subject.drain()
        assert finished(subject.outcomes[id]).completion_tokens <= 20

    def test_requests_beyond_concurrency_wait_and_all_finish(self, small: Subject) -> None:
        ids = [small.generate(f"{p} {n}", sampling(max_tokens=5)) for n in range(2) for p in PROMPTS]
        most_running = most_waiting = 0
        while not all(small.outcomes[id].ended for id in ids):
            small.step()
            most_running = max(most_running, small.load.running)
            most_waiting = max(most_waiting, small.load.waiting)
        assert most_running == 2
        assert most_waiting >= len(ids) - 3
        assert all(finished(small.outcomes[id]).completion_tokens for id in ids)
        small.assert_idle()

    def test_a_waiting_request_can_be_cancelled(self, small: Subject) -> None:
        ids = [small.generate(p, sampling(max_tokens=8)) for p in PROMPTS]
        small.step()
        small.cancel(ids[-1])
        small.drain()
        assert all(finished(small.outcomes[id]) for id in ids[:-1])
        small.assert_idle()

    def test_logprobs_match_the_text(self, subject: Subject) -> None:
        subject.honours("logprobs")
        plain = subject.run(PROMPTS[0])
        outcome = subject.run(PROMPTS[0], sampling(logprobs=0))
        assert outcome.text == plain.text
        assert len(outcome.logprobs) == finished(outcome).completion_tokens
        assert b"".join(bytes(each.bytes) for each in outcome.logprobs).decode(errors="replace") == outcome.text
        assert all(each.logprob <= 0 and each.top == () for each in outcome.logprobs)

    def test_top_logprobs_are_sorted(self, subject: Subject) -> None:
        subject.honours("top_logprobs")
        outcome = subject.run(PROMPTS[0], sampling(logprobs=3))
        for each in outcome.logprobs:
            assert len(each.top) == 3
            assert [p for _, p, _ in each.top] == sorted((p for _, p, _ in each.top), reverse=True)
            assert each.token == each.top[0][0], "greedy takes the likeliest"
            assert each.logprob == pytest.approx(each.top[0][1], abs=1e-3)

    def test_output_under_a_schema_satisfies_it(self, subject: Subject) -> None:
        subject.honours("json_schema")
        wanted = sampling(max_tokens=100, schema=json.dumps(SCHEMA))
        outcome = subject.run("Name a city as JSON: ", wanted)
        assert finished(outcome).reason == "stop"
        jsonschema.validate(json.loads(outcome.text), SCHEMA)

    def test_seed_makes_sampling_reproducible(self, subject: Subject) -> None:
        subject.honours("seed")
        texts = [subject.run(PROMPTS[0], sampling(temperature=1.0, seed=seed)).text for seed in (1, 1, 2, 3, 4)]
        assert texts[0] == texts[1]
        assert len(set(texts)) > 1

    @pytest.mark.parametrize("changes", [{"top_p": 1e-6}, {"top_k": 1}, {"min_p": 1.0}], ids=str)
    def test_filter_leaving_one_token_is_greedy(self, subject: Subject, changes: dict[str, Any]) -> None:
        subject.honours(*(changes.keys() - {"top_p"}))
        assert subject.run(PROMPTS[0], sampling(temperature=1.5, **changes)).text == subject.run(PROMPTS[0]).text

    @pytest.mark.parametrize("name", ["frequency_penalty", "presence_penalty", "repetition_penalty"])
    def test_penalty_changes_repetitive_output(self, subject: Subject, name: str) -> None:
        subject.honours(name)
        plain = subject.run("the river the river the river the", sampling(max_tokens=40))
        other = subject.run("the river the river the river the", sampling(max_tokens=40, **{name: 2.0}))
        assert other.text != plain.text

    def test_ignore_eos_generates_until_max_tokens(self, subject: Subject) -> None:
        subject.honours("ignore_eos")
        outcome = subject.run("Say hello.", sampling(max_tokens=150, ignore_eos=True))
        assert (finished(outcome).completion_tokens, finished(outcome).reason) == (150, "length")


class EmbedContract:
    """Fixture: `subject`, a loaded engine shared by the class."""

    def test_info_has_what_the_worker_needs(self, subject: Subject) -> None:
        assert subject.info.task == "embed"
        assert subject.info.dimensions
        assert subject.info.context_tokens > 0
        assert subject.info.chat_template is None

    def test_vector_has_the_reported_dimensions_and_unit_norm(self, subject: Subject) -> None:
        vector = subject.run_embed("A man is eating food.").vector
        assert vector.shape == (subject.info.dimensions,)
        assert np.linalg.norm(vector) == pytest.approx(1.0, abs=1e-4)

    def test_vectors_are_independent_of_their_batch(self, subject: Subject) -> None:
        texts = [f"{start} {rest}" for start in ("A man", "The river", "Nobody") for rest in ("eats.", "runs fast.")]
        texts += ["water " * 60, "The river fills the pool behind the stone house."]
        alone = [subject.run_embed(text) for text in texts]
        ids = [subject.embed(text) for text in texts * 2]
        subject.drain()
        for number, id in enumerate(ids):
            assert cosine(subject.outcomes[id], alone[number % len(texts)]) >= subject.batch_cosine_min
        assert max(cosine(alone[0], other) for other in alone[1:]) < subject.batch_cosine_min

    def test_token_ids_and_text_give_the_same_vector(self, subject: Subject) -> None:
        for text, ids in subject.token_ids.items():
            by_text, by_ids = subject.run_embed(text), subject.run_embed(ids)
            assert cosine(by_text, by_ids) >= 0.9999
            assert by_text.embedded is not None
            assert by_ids.embedded is not None
            assert by_text.embedded.prompt_tokens == by_ids.embedded.prompt_tokens == len(ids)

    def test_inputs_beyond_one_batch_are_each_embedded_once(self, subject: Subject) -> None:
        ids = [subject.embed(f"text number {n} " + "and so on " * (n % 7)) for n in range(100)]
        subject.drain()
        assert all(subject.outcomes[id].embedded for id in ids)
        assert len({subject.outcomes[id].vector.tobytes() for id in ids}) == len(ids)
        subject.assert_idle()

    def test_cancelled_input_emits_no_events_and_others_finish(self, subject: Subject) -> None:
        ids = [subject.embed(f"text number {n}") for n in range(80)]
        for id in ids[::2]:
            subject.cancel(id)
        subject.engine.cancel("never-seen")
        subject.drain()
        assert all(subject.outcomes[id].embedded for id in ids[1::2])
        subject.assert_idle()

    def test_invalid_inputs_are_rejected(self, subject: Subject) -> None:
        context, ids = subject.info.context_tokens, next(iter(subject.token_ids.values()))
        cases: list[tuple[str | tuple[int, ...], Code]] = [
            ("", Code.INVALID_REQUEST),
            ((), Code.INVALID_REQUEST),
            ((ids[0], -1), Code.INVALID_REQUEST),
            ((ids[0], subject.vocabulary), Code.INVALID_REQUEST),
            ((ids[0], 2**70), Code.INVALID_REQUEST),
            ("half a character: \ud83d", Code.INVALID_REQUEST),
            (ids[:1] * (context + 1), Code.CONTEXT_LENGTH_EXCEEDED),
            ("word " * (context + 1), Code.CONTEXT_LENGTH_EXCEEDED),
        ]
        for content, code in cases:
            refusal = subject.refuses(Embed(subject.id(), content))
            assert (refusal.code, refusal.param) == (code, "input"), (content[:20], refusal)
        said = subject.refuses(Embed(subject.id(), (ids[0], subject.vocabulary))).text
        at_most = subject.vocabulary - 1
        assert said == f"the input holds token id {at_most + 1} at index 1; ids of this model are 0 to {at_most}"
        assert subject.refuses(Generate(subject.id(), "x", GREEDY)).code is Code.WRONG_TASK
        id = subject.embed("first")
        assert subject.refuses(Embed(id, "second")).code is Code.INVALID_REQUEST
        subject.drain()
        assert subject.outcomes[id].embedded
        subject.assert_idle()

    def test_unusual_text_is_embedded(self, subject: Subject) -> None:
        for text in (" ", "\x00", "\n\n", "🌊" * 20, "e\u0301", "مياه", "x" * 200):
            assert np.isfinite(subject.run_embed(text).vector).all()
