"""LLMs on CPU through OpenVINO GenAI: continuous batching and prefix cache behind the Engine protocol.

An exception inside the pipeline's `step` poisons it for good, so everything that could raise there is refused in
`add`: bad sampling values, schemas, prompts that do not fit. Request ids and the concurrency limit are our own.
"""

import json
import math
import os
import secrets
import zlib
from collections import Counter, OrderedDict, deque
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import openvino
import openvino_genai as genai

from forebay.core.engine_settings import OpenVinoSettings
from forebay.core.errors import Code, Refusal
from forebay.core.model import Task
from forebay.core.prefix.journal import BlockCache
from forebay.engines.gguf_header import Header, read_header
from forebay.engines.protocol import (
    Answered,
    Begun,
    Cached,
    Detokenize,
    Detokenized,
    Embed,
    EngineBroken,
    EngineInfo,
    EngineLoad,
    Event,
    Failed,
    Finished,
    Generate,
    Sampling,
    Step,
    Tokenize,
    Tokenized,
    Work,
)
from forebay.engines.sampling import (
    answer_tokens_max,
    check_said,
    check_sampling,
    check_spelling,
    check_text,
    check_tokens,
    too_long,
)
from forebay.engines.schema import json_grammar
from forebay.engines.text import AnswerText, token_logprob

KV_BLOCK_TOKENS = 32
GREEDY_BELOW = 1e-5
"""Temperatures below this are greedy."""
MIN_P_MAX = 0.999999
"""OpenVINO accepts `min_p` only below 1; this value also keeps just the likeliest token."""
WARM_UP_TOKENS = 2
HONOURS = (
    "seed", "frequency_penalty", "presence_penalty", "repetition_penalty", "top_k", "min_p",
    "logprobs", "json_schema", "ignore_eos",
)  # fmt: skip
COUNTS_SAID = False
_IR_FILES = ("openvino_model.xml", "openvino_model.bin", "openvino_tokenizer.xml", "openvino_detokenizer.xml")


@dataclass(slots=True)
class _Sequence:
    id: str
    prompt: Any
    """Token ids of prompt and resumed text: int64, shape [1, n]."""
    prompt_tokens: int
    """Tokens of the prompt alone."""
    config: Any
    """None: there is nothing left to generate."""
    text: AnswerText
    logprobs: bool
    blocks: tuple[int, ...]
    handle: Any = None
    read: bool = False
    """Whether the prompt has been processed; then it is in the prefix cache."""


class OpenVinoEngine:
    """A GGUF file or an OpenVINO IR folder on CPU.

    A seed makes an answer reproducible as long as its batch is the same (measured: 8 of 8 alone, 8 of 8 in the same
    batch). In another batch sums are rounded differently, and at temperature 1 most answers eventually differ.

    Text from another replica is processed as part of the prompt. So an answer with a frequency or presence penalty
    cannot be resumed: OpenVINO computes these over tokens that it generated itself. A seed restarts there.
    """

    def __init__(self, artifact: str, settings: Mapping[str, int | float | str | bool]) -> None:
        self._path = Path(artifact)
        self._settings = OpenVinoSettings.model_validate(dict(settings))
        self._blocks = math.ceil(self._settings.kv_cache_tokens / KV_BLOCK_TOKENS)
        self._context = 0
        self._pipe: Any = None
        self._tokenizer: Any = None
        self._bos: tuple[int, ...] = ()
        self._stop_ids: set[int] = set()
        self._raw: list[bytes] = []  # token id → bytes
        self._shown: list[bytes] = []  # the same, empty for special tokens
        self._piece_bytes_max = 1
        self._sequences: dict[str, _Sequence] = {}  # all accepted sequences that have not ended
        self._waiting: deque[_Sequence] = deque()
        self._running: dict[int, _Sequence] = {}  # by the pipeline's request id
        self._next_request = 0
        self._guard = _PrefixGuard(self._blocks)
        self._cache = BlockCache()  # models OpenVINO's own cache, which cannot be inspected

    def load(self) -> EngineInfo:
        """Load the model and generate a few tokens, plain and as JSON, so that the first request is not slow."""
        header = None if self._path.is_dir() else read_header(self._path)
        if header is None:
            _check_folder(self._path)
        try:
            self._pipe = self._pipeline()
            self._tokenizer = self._pipe.get_tokenizer()
            self._read_vocabulary()
        except (RuntimeError, ValueError) as error:
            raise EngineBroken(f"{self._path}: OpenVINO cannot load this model: {error}") from error
        facts = _facts_of_gguf(header) if header else _facts_of_folder(self._path, self._tokenizer)
        self._bos = (facts.bos_id,) if facts.bos_id is not None else ()
        self._stop_ids = set(self._pipe.get_config().stop_token_ids) | set(facts.stop_ids)
        pool = self._blocks * KV_BLOCK_TOKENS
        self._context = min(facts.context_tokens or pool, pool)
        self._warm_up()
        return EngineInfo(
            engine="openvino",
            version=version("openvino-genai"),
            task=Task.CHAT,
            context_tokens=self._context,
            concurrency=self._settings.concurrency,
            honours=HONOURS,
            kv_total_tokens=pool,
            chat_template=facts.chat_template,
            special_tokens=facts.special_tokens,
            blocks_exact=False if self._settings.prefix_cache else None,
            counts_said=COUNTS_SAID,
        )

    def add(self, work: Work, now: float) -> Answered | None:
        """Accept a `Generate`; it starts in a later step, when there is capacity."""
        if isinstance(work, Embed):
            raise Refusal(Code.WRONG_TASK)
        if isinstance(work, Tokenize):
            return Tokenized(work.id, tuple(self._tokens(work.text, bos=work.special)))
        if isinstance(work, Detokenize):
            check_tokens(work.tokens, len(self._raw))
            return Detokenized(work.id, self._tokenizer.decode(list(work.tokens), skip_special_tokens=False))
        if work.id in self._sequences:
            raise Refusal(Code.INVALID_REQUEST, f"id {work.id!r} is already in use", "id")
        sampling = work.sampling
        check_sampling(sampling, HONOURS)
        ids = self._tokens(work.prompt)
        left = answer_tokens_max(len(ids), sampling.max_tokens, self._context)
        said_ids: list[int] = []
        if work.said:
            check_said(sampling, counts_said=COUNTS_SAID)
            said_ids = self._said_tokens(work.said)
            left -= len(said_ids)
        sequence = _Sequence(
            id=work.id,
            prompt=np.array([ids + said_ids], dtype=np.int64),
            prompt_tokens=len(ids),
            config=self._config(sampling, left) if left > 0 else None,
            text=AnswerText(work.id, sampling.stop, work.said, len(said_ids)),
            logprobs=sampling.logprobs is not None,
            blocks=work.blocks,
        )
        self._sequences[work.id] = sequence
        self._waiting.append(sequence)
        return None

    def cancel(self, id: str) -> None:
        """Forget a sequence. It is computed no further, and its KV blocks are free at the end of the next step."""
        sequence = self._sequences.pop(id, None)
        if sequence is None:
            return
        if sequence.handle is None:
            self._waiting.remove(sequence)
            return
        sequence.handle.cancel()
        self._guard.has_read(id)
        self._running = {number: each for number, each in self._running.items() if each is not sequence}
        self._settle()

    def step(self, now: float) -> Step:
        """One forward pass over all running sequences: at most one new token each, or a chunk of their prompts."""
        events: list[Event] = []
        while self._waiting and self._may_start(self._waiting[0]):
            sequence = self._waiting.popleft()
            if sequence.config is None:
                events.append(self._finished(sequence, "length", 0))
                del self._sequences[sequence.id]
            else:
                self._start(sequence)
        if not self._running:
            return Step(tuple(events), self._load(), None)
        self._pipe.step()
        ended = [number for number, sequence in self._running.items() if self._read(sequence, events)]
        for number in ended:
            id = self._running.pop(number).id
            del self._sequences[id]
            self._guard.has_read(id)
        load = self._load()
        self._settle()
        return Step(tuple(events), load, 0.0 if self._sequences else None, self._cache_news())

    def close(self) -> None:
        """Release everything."""
        for id in tuple(self._sequences):
            self.cancel(id)
        self._tokenizer = None
        self._pipe = None

    def _pipeline(self) -> Any:
        scheduler = genai.SchedulerConfig()
        scheduler.num_kv_blocks = self._blocks
        scheduler.enable_prefix_caching = self._settings.prefix_cache
        scheduler.dynamic_split_fuse = True
        scheduler.max_num_seqs = self._settings.concurrency
        threads = self._settings.threads or len(os.sched_getaffinity(0))
        properties = {"INFERENCE_NUM_THREADS": threads}
        return genai.ContinuousBatchingPipeline(self._path, scheduler, "CPU", properties)

    def _read_vocabulary(self) -> None:
        vocabulary = self._tokenizer.get_vocab()
        size = max(vocabulary.values()) + 1
        self._raw = [b""] * size
        for piece, id in vocabulary.items():
            self._raw[id] = piece
        every = [[id] for id in range(size)]
        shown = self._tokenizer.decode(every, skip_special_tokens=True)
        plain = self._tokenizer.decode(every, skip_special_tokens=False)
        self._shown = [b"" if shown[id] != plain[id] else self._raw[id] for id in range(size)]
        self._piece_bytes_max = max(map(len, self._raw))

    def _tokens(self, prompt: str | tuple[int, ...], *, bos: bool = True) -> list[int]:
        if not isinstance(prompt, str):
            check_tokens(prompt, len(self._raw))
            return list(prompt)
        check_text(prompt, self._piece_bytes_max, self._context)
        ids: list[int] = self._tokenizer.encode(prompt, add_special_tokens=False).input_ids.data[0].tolist()
        if len(ids) >= self._context:  # the tokenizer silently truncates at the model's context
            raise too_long(len(ids), self._context)
        check_tokens(ids, len(self._raw))
        if bos and self._bos and ids[0] != self._bos[0]:
            ids[:0] = self._bos
        return ids

    def _said_tokens(self, said: str) -> list[int]:
        check_text(said, self._piece_bytes_max, self._context, "said")
        ids: list[int] = self._tokenizer.encode(said, add_special_tokens=False).input_ids.data[0].tolist()
        check_tokens(ids, len(self._raw))
        check_spelling(said, b"".join([self._shown[id] for id in ids]).decode("utf-8", "replace"))
        return ids

    def _config(self, sampling: Sampling, max_tokens: int) -> Any:
        config = genai.GenerationConfig()
        config.apply_chat_template = False
        config.max_new_tokens = max_tokens
        config.ignore_eos = sampling.ignore_eos
        config.stop_token_ids = self._stop_ids
        config.frequency_penalty = sampling.frequency_penalty
        config.presence_penalty = sampling.presence_penalty
        if sampling.repetition_penalty is not None:
            config.repetition_penalty = sampling.repetition_penalty
        if sampling.temperature >= GREEDY_BELOW:
            config.do_sample = True
            config.temperature = sampling.temperature
            config.top_p = sampling.top_p
            if sampling.top_k is not None:
                config.top_k = min(sampling.top_k, len(self._raw))
            if sampling.min_p is not None:
                config.min_p = min(sampling.min_p, MIN_P_MAX)
            seed = secrets.randbits(32) if sampling.seed is None else sampling.seed
            config.rng_seed = seed & 0xFFFF_FFFF
        if sampling.logprobs is not None:
            config.logprobs = 1
        if sampling.schema is not None:
            grammar = json_grammar(sampling.schema)
            config.structured_output_config = genai.StructuredOutputConfig(grammar=grammar)
        try:
            config.validate()
        except RuntimeError as error:
            raise Refusal(
                Code.INVALID_REQUEST, f"the engine does not accept these sampling values: {error}"
            ) from error
        return config

    def _may_start(self, sequence: _Sequence) -> bool:
        room = len(self._running) < self._settings.concurrency
        return room and not (self._settings.prefix_cache and self._guard.clashes(sequence.prompt))

    def _start(self, sequence: _Sequence) -> None:
        number, self._next_request = self._next_request, self._next_request + 1
        sequence.handle = self._pipe.add_request(number, openvino.Tensor(sequence.prompt), sequence.config)
        self._guard.reads(sequence.id, sequence.prompt)
        self._cache.use(sequence.blocks)
        self._running[number] = sequence

    def _read(self, sequence: _Sequence, events: list[Event]) -> bool:
        """Process what the last step produced for a sequence; True if it ended."""
        handle, text = sequence.handle, sequence.text
        if not handle.can_read():
            if handle.get_status() != genai.GenerationStatus.IGNORED:
                return False
            events.append(Failed(sequence.id, Code.OVERLOADED, "the KV cache has no room for this request"))
            return True
        if not sequence.read:
            sequence.read = True
            events.append(Begun(sequence.id, sequence.prompt_tokens))
            self._guard.has_read(sequence.id)
            self._cache.store(sequence.blocks, sequence.prompt_tokens)
        while True:
            for output in handle.read().values():
                ids = output.generated_ids
                reason = output.finish_reason
                ended = reason != genai.GenerationFinishReason.NONE
                eos = ended and reason == genai.GenerationFinishReason.STOP
                shown = ids[:-1] if eos else ids
                for place, id in enumerate(shown):
                    logprob = None
                    if sequence.logprobs:
                        logprob = token_logprob(self._raw[id], output.generated_log_probs[place])
                    delta = text.push(self._shown[id], logprob)
                    if delta is not None:
                        events.append(delta)
                    if text.stopped:
                        handle.cancel()
                        events.append(self._finished(sequence, "stop", 0))
                        return True
                if ended:
                    last = text.end()
                    if last is not None:
                        events.append(last)
                    events.append(self._finished(sequence, "stop" if eos else "length", int(eos)))
                    return True
            if not handle.can_read():
                return False

    def _finished(self, sequence: _Sequence, reason: str, unseen: int) -> Finished:
        text = sequence.text
        return Finished(sequence.id, reason, sequence.prompt_tokens, text.tokens + unseen, stop=text.stop)

    def _settle(self) -> None:
        """If the pipeline only holds cancelled requests, let it free them: a step without any computation."""
        if not self._running and self._pipe.has_non_finished_requests():
            self._pipe.step()

    def _cache_news(self) -> Cached | None:
        """Cache changes; OpenVINO keeps the most recently used prompts in blocks that running requests leave free."""
        running = self._running.values()
        beyond = sum(each.text.tokens + (0 if each.read else each.prompt_tokens) for each in running)
        self._cache.shrink(self._blocks * KV_BLOCK_TOKENS - beyond)
        news = self._cache.news()
        return None if news is None else Cached(*news)

    def _load(self) -> EngineLoad:
        batch, used = 0, 0
        if self._running:  # the pipeline's metrics are those of its last step, however long ago
            metrics = self._pipe.get_metrics()
            batch = metrics.scheduled_requests
            used = round(metrics.cache_usage / 100 * self._blocks) * KV_BLOCK_TOKENS
        return EngineLoad(
            running=len(self._running),
            waiting=len(self._waiting),
            kv_used_tokens=used,
            kv_total_tokens=self._blocks * KV_BLOCK_TOKENS,
            batch_size=batch,
            batch_max=self._settings.concurrency,
        )

    def _warm_up(self) -> None:
        schema = '{"type":"object"}'
        for number, sampling in enumerate(
            (Sampling(max_tokens=WARM_UP_TOKENS), Sampling(max_tokens=WARM_UP_TOKENS, schema=schema))
        ):
            self.add(Generate(f"warm-up-{number}", "Hello", sampling), 0.0)
        while self._sequences:
            for event in self.step(0.0).events:
                if isinstance(event, Failed):
                    raise EngineBroken(f"{self._path}: OpenVINO cannot generate: {event.text}")


class _PrefixGuard:
    """Keeps apart requests that OpenVINO would let write into the same KV block.

    OpenVINO gives a partly filled block, left by an earlier prompt, to every new request that continues that prompt,
    and does not copy it during prefill: two such requests in one step overwrite each other's keys and values, and
    both answers are wrong. So the second one starts when the first has completed its prefill.
    """

    def __init__(self, prompts_max: int) -> None:
        self._prompts_max = prompts_max  # each leaves one such block, so the pool holds no more than its blocks
        # length in bytes and checksum; least recently used first
        self._prompts: OrderedDict[tuple[int, int], None] = OrderedDict()
        self._lengths: Counter[int] = Counter()
        self._reading: dict[str, bytes] = {}

    def clashes(self, prompt: Any) -> bool:
        """Whether a request in prefill continues the same earlier prompt as this one."""
        if not self._reading:
            return False
        data = prompt.tobytes()
        length = self._shortest_continued(data)
        return length is not None and any(each[:length] == data[:length] for each in self._reading.values())

    def reads(self, id: str, prompt: Any) -> None:
        """A request starts its prefill."""
        data = self._reading[id] = prompt.tobytes()
        self._shortest_continued(data)
        key = (len(data), zlib.crc32(data))
        if key not in self._prompts:
            self._prompts[key] = None
            self._lengths[len(data)] += 1
            if len(self._prompts) > self._prompts_max:
                (oldest, _), _ = self._prompts.popitem(last=False)
                self._lengths[oldest] -= 1
                if not self._lengths[oldest]:
                    del self._lengths[oldest]

    def has_read(self, id: str) -> None:
        """A request has completed its prefill, or is gone."""
        self._reading.pop(id, None)

    def _shortest_continued(self, data: bytes) -> int | None:
        """Length of the shortest known prompt that is a prefix of this one; all such prompts count as used."""
        shortest, checksum, done = None, 0, 0
        for length in sorted(self._lengths):
            if length > len(data):
                break
            checksum, done = zlib.crc32(data[done:length], checksum), length
            if (length, checksum) in self._prompts:
                self._prompts.move_to_end((length, checksum))
                shortest = shortest or length
        return shortest


@dataclass(frozen=True, slots=True)
class _Facts:
    """Facts from the files of a model besides its weights."""

    context_tokens: int | None
    bos_id: int | None
    """Set if prompts must begin with it."""
    stop_ids: tuple[int, ...]
    chat_template: str | None
    special_tokens: dict[str, str]


def _facts_of_gguf(header: Header) -> _Facts:
    meta = header.metadata
    stops = tuple(id for kind in ("eos", "eot") if (id := meta.get(f"tokenizer.ggml.{kind}_token_id")) is not None)
    kinds = (("bos_token", "bos"), ("eos_token", "eos"), ("unk_token", "unknown"), ("pad_token", "padding"))
    return _Facts(
        context_tokens=header.of_model("context_length"),
        bos_id=meta.get("tokenizer.ggml.bos_token_id") if meta.get("tokenizer.ggml.add_bos_token") else None,
        stop_ids=stops,
        chat_template=meta.get("tokenizer.chat_template"),
        special_tokens={name: text for name, kind in kinds if (text := header.token(kind)) is not None},
    )


def _facts_of_folder(folder: Path, tokenizer: Any) -> _Facts:
    config: dict[str, Any] = {}
    if (folder / "config.json").is_file():
        config = json.loads((folder / "config.json").read_text())
    first = tokenizer.encode("a", add_special_tokens=True).input_ids.data[0].tolist()
    bos = tokenizer.get_bos_token_id()
    named = (
        ("bos_token", tokenizer.get_bos_token()),
        ("eos_token", tokenizer.get_eos_token()),
        ("pad_token", tokenizer.get_pad_token()),
    )
    return _Facts(
        context_tokens=config.get("max_position_embeddings"),
        bos_id=bos if first[:1] == [bos] else None,
        stop_ids=(),
        chat_template=tokenizer.get_original_chat_template() or None,
        special_tokens={name: text for name, text in named if text},
    )


def _check_folder(folder: Path) -> None:
    missing = [name for name in _IR_FILES if not (folder / name).is_file()]
    if missing:
        raise EngineBroken(f"{folder}: not a complete OpenVINO model: {', '.join(missing)} missing")
