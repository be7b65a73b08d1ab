"""The worker's HTTP side: the inference endpoints, and those for the control plane and gateways."""

import asyncio
from collections.abc import Callable
from typing import Final

import msgspec
import structlog

from forebay.core.errors import TABLE, Code, Refusal
from forebay.core.model import BlockNews, LoadReport, ReplicaState, WorkerSpec
from forebay.core.prefix.blocks import BLOCK_BYTES, blocks
from forebay.engines.protocol import EngineInfo, Generate
from forebay.net.replica_protocol import CONTINUE, RETRYABLE, UNIT
from forebay.net.server import Exchange
from forebay.obs.clock import new_id, wall_s
from forebay.obs.metrics import CONTENT_TYPE
from forebay.wire import openai_request as wire
from forebay.wire.apis.messages_answer import MessagesAnswer
from forebay.wire.apis.messages_request import parse_count, parse_messages
from forebay.wire.apis.request_fields import prompt_text
from forebay.wire.apis.responses_answer import ResponsesAnswer
from forebay.wire.apis.responses_request import parse_responses
from forebay.wire.apis.tokens import parse_detokenize, parse_tokenize
from forebay.wire.errors import MESSAGES, RESPONSES, error_body
from forebay.wire.http1 import JSON, TEXT
from forebay.wire.openai_answer import ChatAnswer, CompletionAnswer, Head
from forebay.worker.answers.embedding import Embedding
from forebay.worker.answers.generation import Generation
from forebay.worker.answers.tokens import TokenizerCall
from forebay.worker.call import Call
from forebay.worker.engine_process import EngineProcess
from forebay.worker.meters import Meters
from forebay.worker.preflight import (
    ResumePoint,
    bad_resume_point,
    chat_work,
    completion_work,
    cut_body,
    detokenize_work,
    embed_work,
    tokenize_work,
)

REQUEST_ID_BYTES_MAX = 128
REQUESTS: Final = 256
"""How many requests may be in flight, however few sequences the engine runs at once."""
REQUESTS_PER_PLACE: Final = 4
"""And for each sequence that it runs: gateways send up to twice as many requests (`core.routing.room`), each of them
without knowing at once what the others send. They count requests, so a limit on sequences would refuse what they
could have queued."""
NO_ENDPOINT = "none"
BLOCKS_SINCE: Final = "blocks_since="
"""Query of a load poll: the number of the last prefix cache change known to the caller, 0 if none."""
SEQ_DIGITS_MAX: Final = 18


class Shell:
    """Handles the exchanges of the worker's server."""

    def __init__(
        self, spec: WorkerSpec, engine: EngineProcess, meters: Meters, log: structlog.stdlib.BoundLogger
    ) -> None:
        self._spec = spec
        self._engine = engine
        self._meters = meters
        self._log = log
        self._calls: set[Call] = set()
        self._idle = asyncio.Event()
        self._draining = False
        self._unit = b"%b.%d" % (spec.replica.encode(), spec.generation)
        self._process = new_id("process")
        self.fenced = False
        """The control plane has stopped polling it: its lease has expired."""
        self.asked_at = 0.0
        """When its load was last polled, by the loop's clock."""
        self._posts = {
            "/v1/chat/completions": self._chat,
            "/v1/completions": self._complete,
            MESSAGES: self._message,
            f"{MESSAGES}/count_tokens": self._count,
            RESPONSES: self._respond,
            "/v1/embeddings": self._embed,
            "/v1/tokenize": self._tokenize,
            "/v1/detokenize": self._detokenize,
        }
        self._gets = {"/livez": self._livez, "/readyz": self._readyz, "/metrics": self._metrics, "/load": self._load}

    async def drain(self, grace_s: float) -> bool:
        """Accept no new requests and wait for those in flight; False if some are left after `grace_s`."""
        self._draining = True
        try:
            async with asyncio.timeout(grace_s):
                while self._calls:
                    self._idle.clear()
                    await self._idle.wait()
        except TimeoutError:
            return False
        return True

    def fence(self) -> None:
        """Accept no new requests, and fail those in flight so that they can continue on another replica."""
        self.fenced = self._draining = True
        for call in list(self._calls):
            call.fail(Refusal(Code.FENCED))

    def handle(self, exchange: Exchange) -> None:
        """Respond to an exchange, now or later."""
        path, method = exchange.path, exchange.method
        if (post := self._posts.get(path)) is not None:
            if method == b"POST":
                if exchange.header(UNIT) in (None, self._unit):
                    self._serve(exchange, path, post)
                else:
                    self._reject(exchange, Refusal(Code.OTHER_REPLICA), RETRYABLE)
                return
            allowed = b"POST"
        elif (get := self._gets.get(path)) is not None:
            if method in (b"GET", b"HEAD"):
                get(exchange)
                return
            allowed = b"GET"
        else:
            self._reject(exchange, Refusal(Code.NOT_FOUND, f"No such path: {path[:200]}"))
            return
        self._reject(exchange, Refusal(Code.METHOD_NOT_ALLOWED), (b"allow", allowed))

    def refused(self, code: Code) -> None:
        """Count bytes that never became a request."""
        self._meters.requests(NO_ENDPOINT, code).inc()

    def report(self, news: BlockNews | None = None) -> LoadReport:
        """The worker's load report; `news`: prefix cache changes, if requested."""
        engine, spec = self._engine, self._spec
        load, info, stalled_s = engine.load, engine.info, engine.stalled_s
        running = min(load.running, engine.outstanding)  # the engine's load may be older than the last events
        return LoadReport(
            replica=spec.replica,
            generation=spec.generation,
            model=spec.model,
            revision=spec.revision,
            state=ReplicaState.DRAINING if self._draining else engine.state,
            in_flight=len(self._calls),
            running=running,
            waiting=engine.outstanding - running,
            capacity=info.concurrency if info else 0,
            kv_used_tokens=load.kv_used_tokens or 0,
            kv_total_tokens=load.kv_total_tokens or 0,
            batch_fill=load.batch_size / load.batch_max if load.batch_max else 0.0,
            stalled_s=stalled_s,
            engine_restarts=engine.restarts,
            engine_pid=engine.pid,
            process=self._process,
            blocks=news,
        )

    # --- inference endpoints

    def _serve(self, exchange: Exchange, path: str, post: Callable[[Call, EngineInfo], None]) -> None:
        endpoint = path.removeprefix("/v1/")
        request_id = _request_id(exchange)
        call = Call(exchange, endpoint, request_id, meters=self._meters, log=self._log, ended=self._ended)
        self._calls.add(call)
        try:
            post(call, self._admit())
        except Refusal as refusal:
            call.fail(refusal)
        except Exception as error:  # supervisor: every request gets a response, even after a bug of ours
            self._log.error("request handling failed", request_id=call.request_id, exc_info=error)
            call.fail(Refusal(Code.INTERNAL))

    def _admit(self) -> EngineInfo:
        """What the engine supports, if it may get more work. Raises `Refusal`."""
        if self._draining:
            raise Refusal(Code.FENCED if self.fenced else Code.DRAINING)
        engine = self._engine
        if engine.info is None:
            raise Refusal(Code.ENGINE_LOADING)
        if not engine.ready:
            raise Refusal(Code.ENGINE_FAILED)
        others = len(self._calls) - 1
        if others >= (self._spec.queue_max or max(REQUESTS, REQUESTS_PER_PLACE * engine.info.concurrency)):
            raise Refusal(Code.OVERLOADED, f"The replica has {others} requests in flight, which is its limit.")
        return engine.info

    def _chat(self, call: Call, info: EngineInfo) -> None:
        body, resume_point = cut_body(call.exchange.header(CONTINUE), call.exchange.body)
        request = wire.parse_chat(body)
        self._check_model(request.model)
        id = new_id("chatcmpl")
        names = {**ChatAnswer.names, "max_tokens": request.limit_name}
        works = _named(chat_work(request, info, id, names, resume_point), body, request.model, info)
        writer = ChatAnswer(
            self._head(id, resume_point),
            request.n,
            stream=request.stream,
            include_usage=request.include_usage,
            begun=resume_point.text if resume_point is not None else None,
        )
        logprobs = request.sampling.logprobs is not None
        generation = Generation(
            call, self._engine, writer, works, stream=request.stream, n=request.n, logprobs=logprobs, names=names
        )
        generation.start()

    def _complete(self, call: Call, info: EngineInfo) -> None:
        body, resume_point = cut_body(call.exchange.header(CONTINUE), call.exchange.body)
        request = wire.parse_completion(body)
        self._check_model(request.model)
        id = new_id("cmpl")
        works = _named(completion_work(request, info, id, resume_point), body, request.model, info)
        prefixes: tuple[str, ...] = ()
        if request.echo:
            prefixes = tuple(str(prompt) for prompt in request.prompts for _ in range(request.n))
        writer = CompletionAnswer(
            self._head(id, resume_point),
            len(works),
            stream=request.stream,
            include_usage=request.include_usage,
            prefixes=prefixes,
            begun=resume_point.text if resume_point is not None else None,
        )
        logprobs = request.sampling.logprobs is not None
        Generation(call, self._engine, writer, works, stream=request.stream, n=request.n, logprobs=logprobs).start()

    def _message(self, call: Call, info: EngineInfo) -> None:
        body, resume_point = cut_body(call.exchange.header(CONTINUE), call.exchange.body)
        request = parse_messages(body)
        self._check_model(request.model)
        id = new_id("msg", "_")
        works = _named(chat_work(request, info, id, MessagesAnswer.names, resume_point), body, request.model, info)
        writer = MessagesAnswer(self._head(id, resume_point), resume_point.events if resume_point is not None else 0)
        Generation(call, self._engine, writer, works, stream=request.stream).start()

    def _respond(self, call: Call, info: EngineInfo) -> None:
        body, resume_point = cut_body(call.exchange.header(CONTINUE), call.exchange.body)
        request = parse_responses(body)
        self._check_model(request.chat.model)
        id = new_id("resp", "_")
        works = chat_work(request.chat, info, id, ResponsesAnswer.names, resume_point)
        works = _named(works, body, request.chat.model, info)
        head = self._head(id, resume_point)
        said, events = (resume_point.text, resume_point.events) if resume_point is not None else ("", 0)
        writer = ResponsesAnswer(head, f"msg{head.id.removeprefix('resp')}", request.echo, said, events)
        Generation(call, self._engine, writer, works, stream=request.chat.stream).start()

    def _embed(self, call: Call, info: EngineInfo) -> None:
        _check_new(call)
        request = wire.parse_embeddings(call.exchange.body)
        self._check_model(request.model)
        works = embed_work(request, info, new_id("embd"))
        Embedding(call, self._engine, request.model, request.base64, works).start()

    def _tokenize(self, call: Call, info: EngineInfo) -> None:
        _check_new(call)
        request = parse_tokenize(call.exchange.body)
        self._check_model(request.model)
        param = "prompt" if isinstance(request.content, str) else "messages"
        work = tokenize_work(request, info, new_id("tok"))
        TokenizerCall(call, self._engine, work, param, info.context_tokens).start()

    def _count(self, call: Call, info: EngineInfo) -> None:
        _check_new(call)
        request = parse_count(call.exchange.body)
        self._check_model(request.model)
        work = tokenize_work(request, info, new_id("tok"))
        TokenizerCall(call, self._engine, work, "messages", info.context_tokens, counting=True).start()

    def _detokenize(self, call: Call, info: EngineInfo) -> None:
        _check_new(call)
        request = parse_detokenize(call.exchange.body)
        self._check_model(request.model)
        work = detokenize_work(request, info, new_id("tok"))
        TokenizerCall(call, self._engine, work, "tokens", info.context_tokens).start()

    def _check_model(self, name: str) -> None:
        if name != self._spec.model:
            text = f"The model '{name[:100]}' does not exist here; this replica serves '{self._spec.model}'."
            raise Refusal(Code.MODEL_NOT_FOUND, text, "model")

    def _head(self, id: str, resume_point: ResumePoint | None) -> Head:
        """To the client a continued stream is one stream; to the engine it gets a new id, as both could be on this
        replica."""
        created = int(wall_s()) if resume_point is None else resume_point.created
        return Head(id if resume_point is None else resume_point.id, created, self._spec.model, self._spec.revision)

    def _ended(self, call: Call) -> None:
        self._calls.discard(call)
        if not self._calls:
            self._idle.set()

    # --- endpoints for the control plane and gateways

    def _livez(self, exchange: Exchange) -> None:
        exchange.respond(200, [TEXT], b"ok\n")

    def _readyz(self, exchange: Exchange) -> None:
        state = self.report().state
        exchange.respond(200 if state is ReplicaState.READY else 503, [TEXT], state.encode() + b"\n")

    def _load(self, exchange: Exchange) -> None:
        self.asked_at = asyncio.get_running_loop().time()
        exchange.respond(200, [JSON], msgspec.json.encode(self.report(self._block_news(exchange.query))))

    def _block_news(self, query: str) -> BlockNews | None:
        """The prefix cache changes that a gateway asks for, if any are known."""
        info, seq = self._engine.info, query.removeprefix(BLOCKS_SINCE)
        if info is None or info.blocks_exact is None or seq == query:
            return None
        if not (seq.isascii() and seq.isdigit() and len(seq) <= SEQ_DIGITS_MAX):
            return None
        return self._engine.blocks.since(int(seq), estimated=not info.blocks_exact)

    def _metrics(self, exchange: Exchange) -> None:
        kv_known = self._engine.load.kv_total_tokens is not None
        body = self._meters.render(self.report(), self._engine.tokens_total, kv_known=kv_known)
        exchange.respond(200, [(b"content-type", CONTENT_TYPE)], body)

    def _reject(self, exchange: Exchange, refusal: Refusal, *headers: tuple[bytes, bytes]) -> None:
        self.refused(refusal.code)
        exchange.respond(TABLE[refusal.code].status, [JSON, *headers], error_body(refusal, exchange.path))


def _named(works: list[Generate], body: bytes, model: str, info: EngineInfo) -> list[Generate]:
    """Tell an engine that reports its prefix cache the gateways' hashes of a prompt's blocks.

    In a request with several prompts, the blocks cover all of them together: no engine could hold them.
    """
    if info.blocks_exact is None or len(body) < BLOCK_BYTES or any(work.prompt != works[0].prompt for work in works):
        return works
    names = blocks(prompt_text(body), model)
    return [msgspec.structs.replace(work, blocks=names) for work in works] if names else works


def _check_new(call: Call) -> None:
    if call.exchange.header(CONTINUE) is not None:
        raise bad_resume_point("only generated text is continued")


def _request_id(exchange: Exchange) -> str:
    """The client's request id, if it is safe for headers and logs; else a new one."""
    given = exchange.header(b"x-request-id") or b""
    if 0 < len(given) <= REQUEST_ID_BYTES_MAX and all(33 <= byte <= 126 for byte in given):
        return given.decode("ascii")
    return new_id("req")
