"""Text embeddings through ONNX Runtime: tokenises, batches by length, pools and normalises.

With few threads, each runs batches of its own, a lane: threads that share a batch wait for one another at each of its
hundreds of operations, which on two cores costs a quarter of the throughput. A single text is slower for it.
"""

import os
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt
import onnxruntime
from tokenizers import Tokenizer

from forebay.core.batching import Batch, Batcher, BatchLimits, Idle, WaitUntil
from forebay.core.engine_settings import OnnxSettings
from forebay.core.errors import Code, Refusal
from forebay.core.model import Task
from forebay.engines.protocol import (
    Answered,
    Detokenize,
    Detokenized,
    Embed,
    Embedded,
    EngineBroken,
    EngineInfo,
    EngineLoad,
    Event,
    Failed,
    Step,
    Tokenize,
    Tokenized,
    Work,
)
from forebay.engines.sampling import check_tokens
from forebay.wire.documents import UNREADABLE

CONTEXT_TOKENS_DEFAULT = 512
CHARS_PER_TOKEN_MAX = 100
"""Longer text, in multiples of the context, is rejected before it is tokenised."""
BATCH_TOKENS_PER_THREAD = 512
"""Tokens of a batch per thread, padding included: as much of a layer as fits into a core's own cache.

With three times as many, a token costs 1.2 to 1.4 times as much (bge-small, int8, 2 MB of cache per core).
"""
BATCH_TOKENS_MAX = 4096
"""Maximum tokens of a batch, whatever the number of threads: other texts wait for it."""
LANES_MAX = 4
"""With more threads than this, one lane shares all of them: a single text would be too slow on one of many."""
LANE_FREE_WAIT_S = 0.001
"""How long a step waits for a running batch while a lane is free for new texts."""
SENTENCE_OUTPUT = "sentence_embedding"
"""The output of models that include pooling."""
ELEMENT_TYPES: dict[str, "np.dtype[Any]"] = {"tensor(int64)": np.dtype(np.int64), "tensor(int32)": np.dtype(np.int32)}
KNOWN_INPUTS = frozenset({"input_ids", "attention_mask", "token_type_ids"})

Vectors = npt.NDArray[np.float32]


class OnnxEngine:
    """Embeds texts with the model in `artifact`: a folder with `model.onnx`, or that file next to its tokenizer."""

    def __init__(self, artifact: str, settings: Mapping[str, int | float | str | bool]) -> None:
        self._settings = OnnxSettings.model_validate(dict(settings))
        self._path = Path(artifact)
        self._tokens: dict[str, list[int]] = {}
        self._running: dict[Future[Vectors], list[tuple[str, list[int]]]] = {}

    def load(self) -> EngineInfo:
        """Load the model, and run it once to learn the dimension of its vectors."""
        file = self._path / "model.onnx" if self._path.is_dir() else self._path
        folder = file.parent
        config = _read_json(folder / "config.json")
        self._tokenizer = _open_tokenizer(folder / "tokenizer.json")
        threads = self._settings.threads or len(os.sched_getaffinity(0))
        self._lanes = threads if threads <= LANES_MAX else 1
        self._session = _open_session(file, threads // self._lanes)
        self._inputs = _input_types(self._session, file)
        outputs = [each.name for each in self._session.get_outputs()]
        self._output = SENTENCE_OUTPUT if SENTENCE_OUTPUT in outputs else outputs[0]
        self._pooling = _pooling(folder) if self._settings.pooling == "auto" else self._settings.pooling
        self._pad_id = int(config.get("pad_token_id") or 0)
        self._vocabulary = int(config.get("vocab_size") or self._tokenizer.get_vocab_size())
        self._context = _context_tokens(config, folder)
        options = self._settings
        delay_s = options.max_delay_ms / 1000
        tokens_max = min(BATCH_TOKENS_MAX, threads // self._lanes * BATCH_TOKENS_PER_THREAD)
        limits = BatchLimits(options.max_batch, delay_s, options.queue_max, tokens_max)
        self._batcher: Batcher[str] = Batcher(limits, self._context)
        self._pool = ThreadPoolExecutor(self._lanes, "lane")
        with _loading(file):
            dry = self._embed([self._tokenizer.encode("warm-up").ids] * 2, self._context)
        return EngineInfo(
            engine="onnx",
            version=onnxruntime.__version__,
            task=Task.EMBED,
            context_tokens=self._context,
            concurrency=self._settings.max_batch,
            dimensions=dry.shape[1],
        )

    def add(self, work: Work, now: float) -> Answered | None:
        """Tokenise an input and queue it for a batch."""
        if isinstance(work, Tokenize):
            return Tokenized(work.id, tuple(self._encode(work.text, special=work.special)))
        if isinstance(work, Detokenize):
            check_tokens(work.tokens, self._vocabulary, "input")
            return Detokenized(work.id, self._tokenizer.decode(list(work.tokens), skip_special_tokens=False))
        if not isinstance(work, Embed):
            raise Refusal(Code.WRONG_TASK)
        if work.id in self._tokens:
            raise Refusal(Code.INVALID_REQUEST, f"id {work.id!r} is already in use", "id")
        ids = self._encode(work.input) if isinstance(work.input, str) else list(work.input)
        check_tokens(ids, self._vocabulary, "input")  # a tokenizer without special tokens makes none of blanks
        if len(ids) > self._context:
            text = f"`input` has {len(ids)} tokens; this model takes at most {self._context}"
            raise Refusal(Code.CONTEXT_LENGTH_EXCEEDED, text, "input")
        if not self._batcher.offer(work.id, len(ids), now):
            most = f"at most {self._settings.queue_max} may wait for a batch (engine.queue_max)"
            raise Refusal(Code.OVERLOADED, f"Too many inputs, of this request or others: {most}.")
        self._tokens[work.id] = ids
        return None

    def cancel(self, id: str) -> None:
        """Remove an input from the queue, or ignore its result."""
        self._batcher.cancel(id)
        self._tokens.pop(id, None)

    def step(self, now: float) -> Step:
        """Start batches that are ready and collect finished ones; waits for one while no lane is free."""
        wait_s = self._start(now)
        if not self._running:
            return Step((), self._load(0), wait_s)
        size = max(map(len, self._running.values()))
        patience_s = None if len(self._running) == self._lanes else LANE_FREE_WAIT_S
        done, _ = wait(self._running, patience_s, FIRST_COMPLETED)
        events: list[Event] = []
        for batch in [each for each in self._running if each in done]:
            self._take(self._running.pop(batch), batch.result(), events)
        self._start(now)  # first of all, so that no lane idles while the events are processed
        return Step(tuple(events), self._load(size), 0.0 if self._running or len(self._batcher) else None)

    def close(self) -> None:
        """Release the model once running batches have finished."""
        self._pool.shutdown()
        del self._session, self._tokenizer

    def _load(self, batch_size: int) -> EngineLoad:
        return EngineLoad(
            running=sum(map(len, self._running.values())),
            waiting=len(self._batcher),
            batch_size=batch_size,
            batch_max=self._settings.max_batch,
        )

    def _encode(self, text: str, *, special: bool = True) -> list[int]:
        if not text:
            raise Refusal(
                Code.INVALID_REQUEST, "`input` is an empty string; it must have at least one character", "input"
            )
        if len(text) > CHARS_PER_TOKEN_MAX * self._context:
            reason = f"`input` has {len(text)} characters; this model takes at most {self._context} tokens"
            raise Refusal(Code.CONTEXT_LENGTH_EXCEEDED, reason, "input")
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise Refusal(Code.INVALID_REQUEST, f"`input` has an unpaired surrogate: {error}", "input") from error
        ids: list[int] = self._tokenizer.encode(text, add_special_tokens=special).ids
        return ids

    def _start(self, now: float) -> float | None:
        """Give ready batches to free lanes. Returns the seconds until the next batch, or None if nothing waits."""
        while len(self._running) < self._lanes:
            match self._batcher.poll(now):
                case Batch(ids, length):
                    items = [(id, self._tokens[id]) for id in ids]
                    run = self._pool.submit(self._embed, [tokens for _, tokens in items], length)
                    self._running[run] = items
                case WaitUntil(at):
                    return at - now
                case Idle():
                    return None
        return 0.0

    def _take(self, items: Sequence[tuple[str, list[int]]], vectors: Vectors, events: list[Event]) -> None:
        """Report the results of a batch; inputs cancelled meanwhile are skipped, even if their ids are reused."""
        finite = [bool(row.all()) for row in np.isfinite(vectors)]
        for row, (id, tokens) in enumerate(items):
            if self._tokens.get(id) is not tokens:
                continue
            del self._tokens[id]
            if finite[row]:
                events.append(Embedded(id, vectors[row].tobytes(), len(tokens)))
            else:
                text = "the model gave a vector with infinite or undefined numbers"
                events.append(Failed(id, Code.REQUEST_FAILED, text))

    def _embed(self, tokens: Sequence[Sequence[int]], length: int) -> Vectors:
        """The vectors of a batch, one row each, float32 little-endian."""
        shape = len(tokens), length
        values = {"input_ids": np.full(shape, self._pad_id), "attention_mask": np.zeros(shape, np.int64)}
        for row, ids in enumerate(tokens):
            values["input_ids"][row, : len(ids)] = ids
            values["attention_mask"][row, : len(ids)] = 1
        values["token_type_ids"] = np.zeros(shape, np.int64)
        feed = {name: values[name].astype(kind, copy=False) for name, kind in self._inputs.items()}
        hidden = self._session.run([self._output], feed)[0].astype(np.float32, copy=False)
        vectors: Vectors = hidden
        if hidden.ndim == 3 and self._pooling == "cls":
            vectors = hidden[:, 0]
        elif hidden.ndim == 3:
            mask = values["attention_mask"][:, :, None].astype(np.float32)
            vectors = (hidden * mask).sum(axis=1) / mask.sum(axis=1)
        if self._settings.normalize:
            vectors = vectors / np.maximum(np.linalg.norm(vectors, axis=1, keepdims=True), 1e-12)
        return vectors.astype("<f4", copy=False)


def _read_json(file: Path) -> dict[str, Any]:
    """The JSON object in a file; empty if the file does not exist."""
    try:
        found = msgspec.json.decode(file.read_bytes(), type=dict[str, Any])
    except FileNotFoundError:
        return {}
    except (OSError, *UNREADABLE) as error:
        raise EngineBroken(f"{file}: cannot be read ({error}); fetch the model again") from error
    return found


def _context_tokens(config: Mapping[str, Any], folder: Path) -> int:
    """Maximum input length: the smaller of the model's and the tokenizer's."""
    said = (
        config.get("max_position_embeddings"),
        _read_json(folder / "tokenizer_config.json").get("model_max_length"),
    )
    return min((int(each) for each in said if each and each < 1e9), default=CONTEXT_TOKENS_DEFAULT)


def _open_tokenizer(file: Path) -> Tokenizer:
    if not file.is_file():
        raise EngineBroken(f"{file} is missing; an embedding model needs its tokenizer.json beside the .onnx file")
    with _loading(file):
        tokenizer = Tokenizer.from_file(str(file))
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer


def _open_session(file: Path, threads: int) -> onnxruntime.InferenceSession:
    if not file.is_file():
        raise EngineBroken(f"{file} is missing; expected an ONNX model")
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = threads
    options.inter_op_num_threads = 1
    # spinning between batches would take the cores from the threads that feed and collect work
    options.add_session_config_entry("session.force_spinning_stop", "1")
    # without VNNI, sums of 8-bit products overflow (by a quarter, say); no effect on other processors
    options.add_session_config_entry("session.x64quantprecision", "1")
    options.enable_mem_pattern = False  # patterns are kept per shape, and every batch has another one
    options.log_severity_level = 3
    with _loading(file):
        return onnxruntime.InferenceSession(str(file), options, providers=["CPUExecutionProvider"])


@contextmanager
def _loading(file: Path) -> Iterator[None]:
    try:
        yield
    except Exception as error:  # the exceptions of both libraries have no common base class
        raise EngineBroken(
            f"{file}: not usable as a text embedding model: {error}. Fetch the model again."
        ) from error


def _input_types(session: onnxruntime.InferenceSession, file: Path) -> dict[str, "np.dtype[Any]"]:
    found = {each.name: each.type for each in session.get_inputs()}
    strange = sorted(name for name, kind in found.items() if name not in KNOWN_INPUTS or kind not in ELEMENT_TYPES)
    if strange or "input_ids" not in found:
        raise EngineBroken(
            f"{file}: not a text embedding model: its inputs are {', '.join(sorted(found))}; "
            f"supported are {', '.join(sorted(KNOWN_INPUTS))}, as integers"
        )
    return {name: ELEMENT_TYPES[kind] for name, kind in found.items()}


def _pooling(folder: Path) -> str:
    """`cls` or `mean`, from sentence-transformers' files next to the model."""
    modes = {key for key, on in _read_json(folder / "1_Pooling" / "config.json").items() if on is True}
    modes = {key for key in modes if key.startswith("pooling_mode_")}
    if not modes or modes == {"pooling_mode_cls_token"}:
        return "cls"
    if modes == {"pooling_mode_mean_tokens"}:
        return "mean"
    raise EngineBroken(
        f"{folder}/1_Pooling/config.json asks for {', '.join(sorted(modes))}; supported are cls and mean"
    )
