"""Any GGUF through llama.cpp: its server runs inside this process (package xllamacpp) and is called over loopback.

HTTP rather than the package's callbacks, because closing a connection frees its slot even while the prompt is being
processed, and because one thread can wait for all responses at once. The server only accepts a random key.
"""

import http.client
import json
import os
import secrets
import selectors
import socket
import struct
from collections import deque
from collections.abc import Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httptools
import msgspec

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
# Read by OpenMP when it is loaded: spinning threads make llama.cpp several times slower as soon as another process
# needs the cores too.
import xllamacpp

from forebay.core.engine_settings import LlamaCppSettings
from forebay.core.errors import Code, Refusal
from forebay.core.model import Task
from forebay.engines.gguf_header import Header, read_header
from forebay.engines.llamacpp.slots import SHARED_TOKENS_MIN, Slots
from forebay.engines.protocol import (
    Answered,
    Begun,
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
    TokenLogprob,
    Work,
)
from forebay.engines.sampling import (
    answer_tokens_max,
    check_said,
    check_sampling,
    check_spelling,
    check_text,
    check_tokens,
)
from forebay.engines.schema import json_grammar
from forebay.engines.text import AnswerText

STEP_WAIT_S = 0.01
"""How long a step waits for server output; an upper bound on the delay of new work."""
CALL_TIMEOUT_S = 60.0
RECEIVE_BYTES = 65_536
WARM_UP_TOKENS = 2
HONOURS = (
    "seed", "frequency_penalty", "presence_penalty", "repetition_penalty", "top_k", "min_p",
    "logprobs", "top_logprobs", "json_schema", "ignore_eos",
)  # fmt: skip
_SAMPLERS = ("penalties", "temperature", "top_k", "top_p", "min_p")
_RESET = struct.pack("ii", 1, 0)
"""SO_LINGER: closing resets the connection, which the server notices at its next write."""


@dataclass(slots=True)
class _Sequence:
    id: str
    request: dict[str, Any]
    ids: Sequence[int]
    """Token ids that the server processes."""
    prompt_tokens: int
    said_tokens: int
    """Tokens of the answer that another replica has generated; in `ids` they follow the prompt."""
    reserved_tokens: int
    """Prompt and longest possible answer: llama.cpp cannot preempt, so the KV cells are reserved up front."""
    text: AnswerText
    top: int | None
    blocks: tuple[int, ...]
    answer: "_Answer | None" = None
    slot: int = -1
    """Its slot."""
    read: bool = False
    """Whether the prompt has been processed."""

    @property
    def cells(self) -> int:
        """KV cells in use."""
        return self.prompt_tokens + self.text.tokens


class LlamaCppEngine:
    """A GGUF file. As in llama.cpp, frequency and presence penalties also count the tokens of the prompt.

    Log-probabilities are per character where a character has several tokens. A seed makes an answer reproducible as
    long as its batch and the cache contents are the same.

    Text from another replica is processed as part of the prompt. All penalties count it; a seed restarts there.
    """

    def __init__(self, artifact: str, settings: Mapping[str, int | float | str | bool]) -> None:
        self._path = Path(artifact)
        self._settings = LlamaCppSettings.model_validate(dict(settings))
        self._key = secrets.token_hex(16)
        self._server: Any = None
        self._address = ("", 0)
        self._context = 0
        self._vocabulary_size = 0
        self._piece_bytes_max = 1
        self._bos: tuple[int, ...] = ()
        self._selector: selectors.BaseSelector | None = None
        self._waiting: deque[_Sequence] = deque()
        self._running: dict[str, _Sequence] = {}
        self._reserved_tokens = 0
        self._slots = Slots(self._settings.concurrency)

    def load(self) -> EngineInfo:
        """Load the model, start the server and generate a few tokens."""
        if self._path.is_dir():
            raise EngineBroken(f"{self._path}: is a folder; llama.cpp loads a .gguf file")
        header = read_header(self._path)
        tokens: list[str] = header.metadata.get("tokenizer.ggml.tokens", [])
        if not tokens:
            raise EngineBroken(f"{self._path}: has no vocabulary; llama.cpp needs one to generate text")
        self._vocabulary_size = len(tokens)
        self._piece_bytes_max = max(len(token.encode()) for token in tokens)
        if header.metadata.get("tokenizer.ggml.add_bos_token"):
            self._bos = (header.metadata.get("tokenizer.ggml.bos_token_id", 1),)
        self._context = min(header.of_model("context_length") or self._pool, self._pool)
        try:
            self._server = xllamacpp.Server(self._parameters())
        except (RuntimeError, ValueError) as error:
            raise EngineBroken(f"{self._path}: llama.cpp cannot load this model: {error}") from error
        at = urlsplit(self._server.listening_address)
        self._address = (at.hostname or "127.0.0.1", at.port or 0)
        self._selector = selectors.DefaultSelector()
        self._warm_up()
        return self._info(header)

    def add(self, work: Work, now: float) -> Answered | None:
        """Accept a `Generate`; it starts when a slot and enough of the KV cache are free."""
        if isinstance(work, Embed):
            raise Refusal(Code.WRONG_TASK)
        if isinstance(work, Tokenize):
            return Tokenized(work.id, tuple(self._tokens(work.text, bos=work.special)))
        if isinstance(work, Detokenize):
            check_tokens(work.tokens, self._vocabulary_size)
            return Detokenized(work.id, self._call("/detokenize", {"tokens": work.tokens})["content"])
        if work.id in self._running or any(each.id == work.id for each in self._waiting):
            raise Refusal(Code.INVALID_REQUEST, f"id {work.id!r} is already in use", "id")
        sampling = work.sampling
        check_sampling(sampling, HONOURS)
        ids = self._tokens(work.prompt)
        most = answer_tokens_max(len(ids), sampling.max_tokens, self._context)
        said_ids: list[int] = []
        if work.said:
            check_said(sampling, counts_said=True)
            said_ids = self._said_tokens(work.said)
        read = ids + said_ids
        sequence = _Sequence(
            id=work.id,
            request={
                "prompt": read,
                "n_predict": most - len(said_ids),
                "repeat_last_n": len(ids) + most,
                "cache_prompt": len(read) >= SHARED_TOKENS_MIN,
                **_request(sampling),
            },
            ids=read,
            prompt_tokens=len(ids),
            said_tokens=len(said_ids),
            reserved_tokens=len(ids) + most,
            text=AnswerText(work.id, sampling.stop, work.said, len(said_ids)),
            top=sampling.logprobs,
            blocks=work.blocks,
        )
        self._waiting.append(sequence)
        return None

    def cancel(self, id: str) -> None:
        """Forget a sequence; the server notices the closed connection at its next token and frees the slot."""
        self._waiting = deque(each for each in self._waiting if each.id != id)
        if id in self._running:
            self._end(self._running[id])

    def step(self, now: float) -> Step:
        """Start what fits, then collect server output for a moment."""
        events: list[Event] = []
        while self._waiting and self._fits(self._waiting[0]):
            sequence = self._waiting.popleft()
            if sequence.request["n_predict"] > 0:
                self._start(sequence)
            else:  # for the server, 0 and negative values have special meanings
                events.append(Finished(sequence.id, "length", sequence.prompt_tokens, sequence.text.tokens))
        if self._running and self._selector is not None:
            batch = len(self._running)
            for key, _ in self._selector.select(STEP_WAIT_S):
                sequence = key.data
                if self._listen(sequence, events):
                    self._end(sequence)
        else:
            batch = 0
        used = sum(each.cells for each in self._running.values())
        load = EngineLoad(
            running=len(self._running),
            waiting=len(self._waiting),
            kv_used_tokens=used,
            kv_total_tokens=self._pool,
            batch_size=batch,
            batch_max=self._settings.concurrency,
        )
        self._slots.purge(self._pool - used)
        wait_s = 0.0 if self._running or self._waiting else None
        return Step(tuple(events), load, wait_s, self._slots.news())

    def close(self) -> None:
        """Stop the server and release everything."""
        self._waiting.clear()
        for sequence in tuple(self._running.values()):
            self._end(sequence)
        if self._selector is not None:
            self._selector.close()
            self._selector = None
        self._server = None

    @property
    def _pool(self) -> int:
        return self._settings.kv_cache_tokens

    def _info(self, header: Header) -> EngineInfo:
        kinds = (("bos_token", "bos"), ("eos_token", "eos"), ("unk_token", "unknown"), ("pad_token", "padding"))
        return EngineInfo(
            engine="llamacpp",
            version=version("xllamacpp"),
            task=Task.CHAT,
            context_tokens=self._context,
            concurrency=self._settings.concurrency,
            honours=HONOURS,
            kv_total_tokens=self._pool,
            chat_template=header.metadata.get("tokenizer.chat_template"),
            special_tokens={name: text for name, kind in kinds if (text := header.token(kind)) is not None},
            blocks_exact=False,  # a slot's cache cannot be used by others while a request runs there
        )

    def _parameters(self) -> Any:
        parameters = xllamacpp.CommonParams()
        parameters.model.path = str(self._path)
        parameters.hostnames = ["127.0.0.1"]
        parameters.port = 0
        parameters.api_keys = [self._key]
        parameters.n_ctx = self._pool
        parameters.n_parallel = self._settings.concurrency
        parameters.kv_unified = True  # one request may use the whole cache
        parameters.n_threads_http = self._settings.concurrency + 2
        parameters.n_gpu_layers = 0
        parameters.fit_params = False
        parameters.cache_ram_mib = 0  # no second cache besides the KV cache
        parameters.ui = False
        parameters.verbosity = 0
        threads, cores = self._settings.threads, len(os.sched_getaffinity(0))
        if threads or cores != os.cpu_count():  # by default llama.cpp counts all cores of the machine
            parameters.cpuparams.n_threads = parameters.cpuparams_batch.n_threads = threads or cores
        return parameters

    def _tokens(self, prompt: str | tuple[int, ...], *, bos: bool = True) -> list[int]:
        if not isinstance(prompt, str):
            check_tokens(prompt, self._vocabulary_size)
            return list(prompt)
        check_text(prompt, self._piece_bytes_max, self._context)
        ids: list[int] = self._call("/tokenize", {"content": prompt, "add_special": False, "parse_special": True})[
            "tokens"
        ]
        check_tokens(ids, self._vocabulary_size)
        return [*self._bos, *ids] if bos and self._bos and ids[0] != self._bos[0] else ids

    def _said_tokens(self, said: str) -> list[int]:
        check_text(said, self._piece_bytes_max, self._context, "said")
        asked = {"content": said, "add_special": False, "parse_special": False}
        ids: list[int] = self._call("/tokenize", asked)["tokens"]
        check_spelling(said, self._call("/detokenize", {"tokens": ids})["content"])
        return ids

    def _call(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
        """Send one request to the server and read the whole response."""
        with closing(http.client.HTTPConnection(*self._address, timeout=CALL_TIMEOUT_S)) as connection:
            connection.request("POST", path, json.dumps(body), {"Authorization": f"Bearer {self._key}"})
            answer = connection.getresponse()
            data = answer.read()
        if answer.status != http.client.OK:
            raise EngineBroken(f"llama.cpp answered {path} with {answer.status}: {data[:500]!r}")
        decoded: dict[str, Any] = json.loads(data)
        return decoded

    def _fits(self, sequence: _Sequence) -> bool:
        return (
            len(self._running) < self._settings.concurrency
            and self._reserved_tokens + sequence.reserved_tokens <= self._pool
        )

    def _start(self, sequence: _Sequence) -> None:
        assert self._selector is not None
        sequence.slot = self._slots.take(sequence.ids)
        body = msgspec.json.encode({**sequence.request, "id_slot": sequence.slot})
        head = (
            f"POST /completion HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer {self._key}\r\n"
            f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\nConnection: close\r\n\r\n"
        )
        connection = socket.create_connection(self._address, timeout=CALL_TIMEOUT_S)
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET)
        sequence.answer = _Answer(connection)
        self._running[sequence.id] = sequence
        self._reserved_tokens += sequence.reserved_tokens
        self._selector.register(connection, selectors.EVENT_READ, sequence)
        connection.sendall(head.encode() + body)
        connection.setblocking(False)

    def _end(self, sequence: _Sequence) -> None:
        assert self._selector is not None
        assert sequence.answer is not None
        del self._running[sequence.id]
        self._slots.free(sequence)
        self._reserved_tokens -= sequence.reserved_tokens
        self._selector.unregister(sequence.answer.connection)
        sequence.answer.connection.close()

    def _listen(self, sequence: _Sequence, events: list[Event]) -> bool:
        """Process what has arrived for a sequence; True if it ended."""
        assert sequence.answer is not None
        for message in sequence.answer.receive():
            if "error" in message:
                events.append(_failure(sequence.id, message["error"]))
                return True
            if not sequence.read:
                sequence.read = True
                self._slots.fill(sequence)
                events.append(Begun(sequence.id, sequence.prompt_tokens))
            if self._book(sequence, message, events):
                return True
        return False

    def _book(self, sequence: _Sequence, message: dict[str, Any], events: list[Event]) -> bool:
        text, delta = sequence.text, None
        ended = message["stop"]
        generated = sequence.said_tokens + message["tokens_predicted"]
        if not ended:
            delta = text.push(message["content"].encode(), _logprob(message, sequence.top), generated - text.tokens)
        elif text.tokens < generated:
            text.tokens = generated  # the end token, or the rest of a character never completed
        if delta is None and ended:
            delta = text.end()
        if delta is not None:
            events.append(delta)
        if not ended and not text.stopped:
            return False
        reason = "length" if ended and message["stop_type"] == "limit" else "stop"
        cached = min(message["timings"]["cache_n"], sequence.prompt_tokens) if ended else None
        events.append(Finished(sequence.id, reason, sequence.prompt_tokens, text.tokens, cached, text.stop))
        return True

    def _warm_up(self) -> None:
        self.add(Generate("warm-up", (0,), Sampling(max_tokens=WARM_UP_TOKENS)), 0.0)
        while self._running or self._waiting:
            for event in self.step(0.0).events:
                if isinstance(event, Failed):
                    raise EngineBroken(f"{self._path}: llama.cpp cannot generate: {event.text}")


@dataclass(slots=True)
class _Answer:
    """The server's response on one connection: HTTP with server-sent events of JSON."""

    connection: socket.socket
    status_ok: bool = False
    complete: bool = False
    _parser: Any = None
    _body: bytearray = field(default_factory=bytearray)

    def __post_init__(self) -> None:
        self._parser = httptools.HttpResponseParser(self)

    def on_headers_complete(self) -> None:
        self.status_ok = self._parser.get_status_code() == http.client.OK

    def on_body(self, data: bytes) -> None:
        self._body += data

    def on_message_complete(self) -> None:
        self.complete = True

    def receive(self) -> list[dict[str, Any]]:
        """Messages received since the last call. Raises `EngineBroken` if the server is gone."""
        try:
            data = self.connection.recv(RECEIVE_BYTES)
        except BlockingIOError:
            return []
        except OSError as error:
            raise EngineBroken(f"llama.cpp: connection lost: {error.strerror or error}") from error
        if data:
            self._parser.feed_data(data)
        if not data and not self.complete:
            raise EngineBroken("llama.cpp closed a connection in the middle of an answer")
        if not self.status_ok:
            return [msgspec.json.decode(self._body)] if self.complete else []
        *events, rest = bytes(self._body).split(b"\n\n")
        self._body = bytearray(rest)
        return [message for event in events if (message := _message(event)) is not None]


def _message(event: bytes) -> dict[str, Any] | None:
    name, _, data = event.partition(b":")
    if name.strip() == b"error":
        return {"error": msgspec.json.decode(data)}
    if name.strip() != b"data" or data.strip() == b"[DONE]":
        return None  # a keep-alive comment
    decoded: dict[str, Any] = msgspec.json.decode(data)
    return decoded


def _failure(id: str, error: dict[str, Any]) -> Failed:
    text = str(error.get("message", error))
    if error.get("type") == "invalid_request_error":
        return Failed(id, Code.INVALID_REQUEST, f"llama.cpp rejects this request: {text}")
    if error.get("type") == "exceed_context_size_error":
        return Failed(id, Code.CONTEXT_LENGTH_EXCEEDED, text, "prompt")
    return Failed(id, Code.REQUEST_FAILED, f"llama.cpp: {text}")


def _request(sampling: Sampling) -> dict[str, Any]:
    """Sampling parameters for llama.cpp; everything not requested is switched off."""
    seed = secrets.randbits(31) if sampling.seed is None else sampling.seed & 0x7FFF_FFFF
    request: dict[str, Any] = {
        "stream": True,
        "samplers": _SAMPLERS,
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "top_k": sampling.top_k or 0,
        "min_p": sampling.min_p or 0.0,
        "frequency_penalty": sampling.frequency_penalty,
        "presence_penalty": sampling.presence_penalty,
        "repeat_penalty": 1.0 if sampling.repetition_penalty is None else sampling.repetition_penalty,
        "seed": seed,
        "ignore_eos": sampling.ignore_eos,
    }
    if sampling.logprobs is not None:
        request["n_probs"] = max(1, sampling.logprobs)
    if sampling.schema is not None:
        request["grammar"] = json_grammar(sampling.schema)
    return request


def _logprob(message: dict[str, Any], top: int | None) -> TokenLogprob | None:
    if top is None or not message.get("completion_probabilities"):
        return None
    entry = message["completion_probabilities"][0]
    likeliest = tuple((each["token"], each["logprob"], tuple(each["bytes"])) for each in entry["top_logprobs"][:top])
    return TokenLogprob(entry["token"], entry["logprob"], tuple(entry["bytes"]), likeliest)
