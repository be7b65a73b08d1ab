"""Queue, batching, KV accounting and clock of the synthetic engine; `model` decides what it generates.

A rolling hash over all tokens, of prompt and answer alike, determines the next one. So an answer does not depend on
its batch, and a prompt that ends with the beginning of an answer continues with the rest of it. The same hash, with
the seed, replaces randomness: a resumed answer ends as it would have without interruption.

The prefix cache knows prompts by `Generate.blocks`. It uses the KV memory that running requests leave free.
"""

from collections import Counter, deque
from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np

from forebay.core.engine_settings import SyntheticSettings
from forebay.core.errors import Code, Refusal
from forebay.core.model import Task
from forebay.core.prefix.journal import BlockCache
from forebay.engines.protocol import (
    Answered,
    Begun,
    Cached,
    Detokenize,
    Detokenized,
    Embed,
    Embedded,
    EngineInfo,
    EngineLoad,
    Event,
    Finished,
    Generate,
    Sampling,
    Step,
    Tokenize,
    Tokenized,
    TokenLogprob,
    Work,
)
from forebay.engines.sampling import answer_tokens_max, check_said, check_sampling, check_text, check_tokens
from forebay.engines.synthetic import model
from forebay.engines.text import AnswerText

VERSION = "1"
CONTEXT_TOKENS_MAX = 8192
LAG_S_MAX = 0.05
"""Steps called late by up to this much lose no throughput; longer delays do, as on a real device."""
HONOURS = (
    "seed", "frequency_penalty", "presence_penalty", "repetition_penalty", "top_k", "min_p",
    "logprobs", "top_logprobs", "json_schema", "ignore_eos",
)  # fmt: skip
CHAT_TEMPLATE = """\
{%- for m in messages %}{{ m.role }}: {{ m.content }}
{% endfor %}{% if add_generation_prompt %}assistant:{% endif %}"""


@dataclass(slots=True)
class _Sequence:
    id: str
    sampling: Sampling
    prompt_ids: tuple[int, ...]
    limit: int
    """Maximum tokens of the answer."""
    forced: tuple[str, ...] | None
    """Tokens that a schema forces; None: free generation."""
    seed: int
    text: AnswerText
    state: int
    last_id: int = -1
    blocks: tuple[int, ...] = ()
    cached_tokens: int = 0
    """Prompt tokens found in the prefix cache."""
    read: bool = False
    said: Counter[int] = field(default_factory=Counter)
    prompt_set: frozenset[int] = frozenset()

    @property
    def held(self) -> int:
        """Tokens in the KV cache; resumed text counts for no more than the answer's limit."""
        return len(self.prompt_ids) + min(self.text.tokens, self.limit)

    @property
    def own(self) -> int:
        """Tokens that are not in the prefix cache."""
        return self.held - (len(self.prompt_ids) if self.read and self.blocks else 0)


class SyntheticEngine:
    """Generates words or vectors, depending on the setting `task` (`chat`, `embed`); `artifact` is ignored."""

    def __init__(self, artifact: str, settings: Mapping[str, int | float | str | bool]) -> None:
        options = {key: value for key, value in settings.items() if key != "task"}
        self._settings = SyntheticSettings.model_validate(options)
        self._task = Task(str(settings.get("task", Task.CHAT)))
        self._context = min(CONTEXT_TOKENS_MAX, self._settings.kv_cache_tokens)
        self._ids: set[str] = set()
        self._waiting: deque[_Sequence] = deque()
        self._running: list[_Sequence] = []
        self._texts: deque[tuple[str, tuple[int, ...]]] = deque()
        self._embedding: list[tuple[str, tuple[int, ...]]] = []
        self._busy_until: float | None = None
        self._cache = BlockCache()

    def load(self) -> EngineInfo:
        """Report the capabilities; there is nothing to load."""
        chat = self._task is Task.CHAT
        return EngineInfo(
            engine="synthetic",
            version=VERSION,
            task=self._task,
            context_tokens=self._context,
            concurrency=self._settings.concurrency,
            honours=HONOURS if chat else (),
            kv_total_tokens=self._settings.kv_cache_tokens if chat else None,
            dimensions=None if chat else self._settings.dimensions,
            chat_template=CHAT_TEMPLATE if chat else None,
            blocks_exact=True if chat else None,
        )

    def add(self, work: Work, now: float) -> Answered | None:
        """Queue a sequence or a text."""
        if isinstance(work, Tokenize):
            check_text(work.text, model.PIECE_BYTES_MAX, self._context)
            return Tokenized(work.id, model.encode(work.text))
        if isinstance(work, Detokenize):
            check_tokens(work.tokens, model.VOCABULARY)
            return Detokenized(work.id, model.decode(work.tokens))
        if work.id in self._ids:
            raise Refusal(Code.INVALID_REQUEST, f"id {work.id!r} is already in use", "id")
        if isinstance(work, Embed) != (self._task is Task.EMBED):
            raise Refusal(Code.WRONG_TASK)
        if self._settings.error_share and model.chance(work.id) < self._settings.error_share:
            raise Refusal(Code.REQUEST_FAILED, "The engine fails a share of requests, as set by `error_share`.")
        if isinstance(work, Embed):
            self._texts.append((work.id, self._input(work)))
        else:
            self._waiting.append(self._sequence(work))
        self._ids.add(work.id)
        return None

    def cancel(self, id: str) -> None:
        """Forget a sequence or a text."""
        if id in self._ids:
            self._ids.discard(id)
            self._waiting = deque(each for each in self._waiting if each.id != id)
            self._running = [each for each in self._running if each.id != id]
            self._texts = deque(each for each in self._texts if each[0] != id)
            self._embedding = [each for each in self._embedding if each[0] != id]

    def step(self, now: float) -> Step:
        """Finish the current step if its time is up and begin the next; never sleeps."""
        if self._busy_until is not None and now < self._busy_until:
            return Step((), self._load(), self._busy_until - now)
        events: list[Event] = []
        start = now
        if self._busy_until is not None:
            start = max(self._busy_until, now - LAG_S_MAX)
            self._finish_step(events)
        duration_s = self._begin_step()
        self._busy_until = None if duration_s is None else start + duration_s
        wait_s = None if self._busy_until is None else max(0.0, self._busy_until - now)
        news = self._cache.news()
        return Step(tuple(events), self._load(), wait_s, None if news is None else Cached(*news))

    def close(self) -> None:
        """Nothing to release."""

    def _sequence(self, work: Generate) -> _Sequence:
        sampling = work.sampling
        check_sampling(sampling, HONOURS)
        ids = _token_ids(work.prompt, "prompt")
        check_tokens(ids, model.VOCABULARY)
        limit = answer_tokens_max(len(ids), sampling.max_tokens, self._context)
        if work.said:
            check_said(sampling, counts_said=True)
        said_ids = _token_ids(work.said, "said")
        forced = None
        if sampling.schema is not None:
            forced = tuple(model.pieces(model.smallest_instance(sampling.schema)))
        return _Sequence(
            id=work.id,
            sampling=sampling,
            prompt_ids=ids,
            limit=limit,
            forced=forced,
            seed=model.roll(0, model.encode(work.id)) if sampling.seed is None else sampling.seed,
            text=AnswerText(work.id, sampling.stop, work.said, len(said_ids)),
            state=model.roll(model.roll(0, ids), said_ids),
            last_id=(ids + said_ids)[-1],
            blocks=work.blocks,
            said=model.count_words(work.said),
            prompt_set=frozenset(ids) if sampling.repetition_penalty is not None else frozenset(),
        )

    def _input(self, work: Embed) -> tuple[int, ...]:
        ids = _token_ids(work.input, "input")
        check_tokens(ids, model.VOCABULARY, "input")
        if len(ids) > self._context:
            text = f"`input` has {len(ids)} tokens; this model takes at most {self._context}"
            raise Refusal(Code.CONTEXT_LENGTH_EXCEEDED, text, "input")
        return ids

    def _begin_step(self) -> float | None:
        """Form the next step; returns its duration in seconds, or None if there is nothing to do."""
        settings = self._settings
        prefill = 0
        if self._task is Task.EMBED:
            while self._texts and len(self._embedding) < settings.concurrency:
                self._embedding.append(self._texts.popleft())
                prefill += len(self._embedding[-1][1])
            busy = bool(self._embedding)
        else:
            while self._kv_used() + len(self._running) > settings.kv_cache_tokens:
                self._waiting.appendleft(self._running.pop())  # the youngest sequence is preempted and starts over
            while self._waiting and self._fits(self._waiting[0]):
                sequence = self._waiting.popleft()
                self._running.append(sequence)
                # the last token is always computed
                hit = min(self._cache.use(sequence.blocks), len(sequence.prompt_ids) - 1)
                prefill += sequence.held - hit
                if not sequence.read:
                    sequence.cached_tokens = hit
            busy = bool(self._running)
        return prefill / settings.prefill_tokens_per_s + settings.step_ms / 1000 if busy else None

    def _fits(self, sequence: _Sequence) -> bool:
        after = len(self._running) + 1
        kv_tokens = self._kv_used() + sequence.held + after
        return after <= self._settings.concurrency and kv_tokens <= self._settings.kv_cache_tokens

    def _kv_used(self) -> int:
        return sum(sequence.held for sequence in self._running)

    def _load(self) -> EngineLoad:
        if self._task is Task.EMBED:
            running, waiting, kv_used, kv_total = len(self._embedding), len(self._texts), None, None
        else:
            running, waiting, kv_used = len(self._running), len(self._waiting), self._kv_used()
            kv_total = self._settings.kv_cache_tokens
        return EngineLoad(running, waiting, kv_used, kv_total, running, self._settings.concurrency)

    def _finish_step(self, events: list[Event]) -> None:
        for id, ids in self._embedding:
            events.append(Embedded(id, self._vector(ids), len(ids)))
            self._ids.discard(id)
        self._embedding = []
        still = []
        for sequence in self._running:
            if not sequence.read:
                sequence.read = True
                events.append(Begun(sequence.id, len(sequence.prompt_ids), sequence.cached_tokens))
                self._cache.store(sequence.blocks, len(sequence.prompt_ids))
            reason = _advance(sequence, events)
            if reason is None:
                still.append(sequence)
            else:
                events.append(self._finished(sequence, reason))
                self._ids.discard(sequence.id)
        self._running = still
        if self._cache.tokens:
            self._cache.shrink(self._settings.kv_cache_tokens - sum(sequence.own for sequence in still))

    def _finished(self, sequence: _Sequence, reason: str) -> Finished:
        prompt_tokens, text = len(sequence.prompt_ids), sequence.text
        return Finished(sequence.id, reason, prompt_tokens, text.tokens, sequence.cached_tokens, text.stop)

    def _vector(self, ids: tuple[int, ...]) -> bytes:
        """A point on the unit sphere, determined by the tokens."""
        vector = np.random.default_rng(model.roll(0, ids)).standard_normal(self._settings.dimensions)
        return (vector / np.linalg.norm(vector)).astype("<f4").tobytes()


def _token_ids(content: str | tuple[int, ...], param: str) -> tuple[int, ...]:
    if not isinstance(content, str):
        return content
    try:
        return model.encode(content)
    except UnicodeEncodeError as error:
        raise Refusal(Code.INVALID_REQUEST, f"`{param}` has an unpaired surrogate: {error}", param) from error


def _advance(sequence: _Sequence, events: list[Event]) -> str | None:
    """Generate one more token; returns the finish reason if it was the last."""
    sampling, answer = sequence.sampling, sequence.text
    if answer.tokens >= sequence.limit:  # the resumed text already has the maximum length
        return _end(answer, "length", events)
    over = False
    logprob: TokenLogprob | None = None
    if sequence.forced is not None:
        token = sequence.forced[answer.tokens]
        ids = model.encode(token)
        logprob = TokenLogprob(token, 0.0, tuple(token.encode()), ((token, 0.0, tuple(token.encode())),))
        over = answer.tokens + 1 == len(sequence.forced)
    elif not sampling.ignore_eos and model.ends(sequence.state, sequence.last_id):
        return _end(answer, "stop", events)
    else:
        word = model.next_word(sequence.state, sampling, sequence.seed, sequence.said, sequence.prompt_set)
        sequence.said[word] += 1
        token, ids = model.WORDS[word], (model.WORD_IDS[word],)
        if sampling.logprobs is not None:
            logprob = model.word_logprob(sequence.state, word, sampling.logprobs)
    sequence.last_id = ids[-1]
    sequence.state = model.roll(sequence.state, ids)
    delta = answer.push(token.encode(), None if sampling.logprobs is None else logprob)
    if delta is not None:
        events.append(delta)
    if answer.stopped or over:
        return _end(answer, "stop", events)
    return _end(answer, "length", events) if answer.tokens == sequence.limit else None


def _end(answer: AnswerText, reason: str, events: list[Event]) -> str:
    rest = answer.end()
    if rest is not None:
        events.append(rest)
    return reason
