"""Converts requests to engine work. Rejects what the engine does not support, or what is certainly too large."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from forebay.core.errors import Code, Refusal
from forebay.core.model import Task
from forebay.engines.protocol import Detokenize, Embed, EngineInfo, Generate, Sampling, Tokenize
from forebay.engines.text import render_chat
from forebay.net.replica_protocol import CONTINUE
from forebay.wire import openai_request as wire
from forebay.wire.apis.tokens import DetokenizeRequest, TokenizeRequest
from forebay.wire.openai_fields import INT64_MIN

TOKEN_CHARS_MAX = 64
"""No text has longer tokens on average: a text too long by this measure is not even tokenised."""

_CONTINUE: Final = re.compile(rb"([!-+\--~]{1,128}),([0-9]{1,15}),([0-9]{1,15})(?:,([0-9]{1,15}))?")


@dataclass(frozen=True, slots=True)
class ResumePoint:
    """The point at which to resume another replica's stream: its `id` and `created`, and what the client already
    has."""

    id: str
    created: int
    text: str
    events: int = 0


def cut_body(header: bytes | None, body: bytes) -> tuple[bytes, ResumePoint | None]:
    """The body that the client sent, and the resume point if its response is to be continued. Raises `Refusal`.

    `header` is the value of `x-forebay-continue`.
    """
    if header is None:
        return body, None
    found = _CONTINUE.fullmatch(header)
    if found is None:
        raise bad_resume_point("expected ID,CREATED,BYTES,EVENTS")
    id, created, length, events = found[1].decode("ascii"), int(found[2]), int(found[3]), int(found[4] or 0)
    if length > len(body):
        raise bad_resume_point(f"the body has only {len(body)} bytes")
    end = len(body) - length
    try:
        return body[:end], ResumePoint(id, created, body[end:].decode(), events)
    except UnicodeDecodeError as error:
        raise bad_resume_point(f"the text at the end of the body is not UTF-8: {error}") from error


def bad_resume_point(why: str) -> Refusal:
    """The error for an invalid request to continue a stream."""
    name = CONTINUE.decode()
    return Refusal(Code.INVALID_REQUEST, f"'{name}': {why}.", name)


def chat_work(
    request: wire.ChatRequest,
    info: EngineInfo,
    id: str,
    names: Mapping[str, str],
    resume_point: ResumePoint | None = None,
) -> list[Generate]:
    """One sequence for each choice. Raises `Refusal`; `names` maps engine parameters to the request's names."""
    prompt = _conversation(request.model, request.messages, info, names["prompt"])
    _check_needs(request, info, names)
    said = _generated_text(resume_point, "", stream=request.stream, choices=request.n)
    return [Generate(f"{id}#{k}", prompt, _sampling(request.sampling, k), said) for k in range(request.n)]


def completion_work(
    request: wire.CompletionRequest, info: EngineInfo, id: str, resume_point: ResumePoint | None = None
) -> list[Generate]:
    """One sequence for each choice of each prompt. Raises `Refusal`."""
    if info.task is not Task.CHAT:
        raise Refusal(
            Code.WRONG_TASK, f"Model '{request.model}' does not support text completion.{_hint(info)}", "model"
        )
    _check_needs(request, info, {})
    _check_lengths(request.prompts, info, "prompt")
    n = request.n
    echoed = str(request.prompts[0]) if request.echo else ""
    said = _generated_text(resume_point, echoed, stream=request.stream, choices=n * len(request.prompts))
    return [
        Generate(f"{id}#{i * n + k}", prompt, _sampling(request.sampling, k), said)
        for i, prompt in enumerate(request.prompts)
        for k in range(n)
    ]


def embed_work(request: wire.EmbeddingsRequest, info: EngineInfo, id: str) -> list[Embed]:
    """One sequence for each input. Raises `Refusal`."""
    if info.task is not Task.EMBED:
        raise Refusal(Code.WRONG_TASK, f"Model '{request.model}' does not compute embeddings.{_hint(info)}", "model")
    if request.dimensions is not None and request.dimensions != info.dimensions:
        text = f"'dimensions' is {request.dimensions}; this model always gives {info.dimensions}."
        raise Refusal(Code.UNSUPPORTED_PARAMETER, text, "dimensions")
    _check_lengths(request.inputs, info, "input")
    return [Embed(f"{id}#{i}", item) for i, item in enumerate(request.inputs)]


def tokenize_work(request: TokenizeRequest, info: EngineInfo, id: str) -> Tokenize:
    """The tokenization of a text; messages are first rendered into the prompt. Raises `Refusal`."""
    if isinstance(request.content, str):
        _check_length(request.content, info, "prompt")
        return Tokenize(id, request.content, request.special)
    return Tokenize(id, _conversation(request.model, request.content, info, "messages"), request.special)


def detokenize_work(request: DetokenizeRequest, info: EngineInfo, id: str) -> Detokenize:
    """The detokenization of tokens. Raises `Refusal`."""
    _check_length(request.tokens, info, "tokens")
    return Detokenize(id, request.tokens)


def _conversation(model: str, messages: Sequence[Mapping[str, str]], info: EngineInfo, param: str) -> str:
    """The prompt rendered from messages."""
    if info.task is not Task.CHAT or info.chat_template is None:
        raise Refusal(Code.WRONG_TASK, f"Model '{model}' does not support chat.{_hint(info)}", "model")
    prompt = render_chat(info.chat_template, messages, info.special_tokens, param)
    _check_length(prompt, info, param)
    return prompt


def _generated_text(resume_point: ResumePoint | None, echoed: str, *, stream: bool, choices: int) -> str:
    """The text already sent that an engine generated: all but the echoed prompt, which is sent in one piece."""
    if resume_point is None:
        return ""
    if not stream or choices != 1:
        raise bad_resume_point("only a stream with one choice can be continued")
    if resume_point.text and not resume_point.text.startswith(echoed):
        raise bad_resume_point("the text does not begin with the prompt, as 'echo' has it")
    return resume_point.text[len(echoed) :]


def _hint(info: EngineInfo) -> str:
    if info.task is Task.EMBED:
        return " Use /v1/embeddings."
    return " Use /v1/completions." if info.chat_template is None else " Use /v1/chat/completions or /v1/completions."


def _check_needs(
    request: wire.ChatRequest | wire.CompletionRequest, info: EngineInfo, names: Mapping[str, str]
) -> None:
    for capability, field in wire.needs(request):
        if capability not in info.honours:
            param = names.get(field, field)
            text = f"'{param}' is not supported: engine {info.engine} of this model cannot honour it; leave it out."
            raise Refusal(Code.UNSUPPORTED_PARAMETER, text, param)


def _check_lengths(inputs: Sequence[wire.Input], info: EngineInfo, param: str) -> None:
    for i, one in enumerate(inputs):
        _check_length(one, info, param if len(inputs) == 1 else f"{param}[{i}]")


def _check_length(prompt: wire.Input, info: EngineInfo, param: str) -> None:
    """Rejects prompts that are certainly too long for the model; exact counting is left to the engine."""
    limit = info.context_tokens if isinstance(prompt, tuple) else info.context_tokens * TOKEN_CHARS_MAX
    if len(prompt) > limit:
        unit = "tokens" if isinstance(prompt, tuple) else "characters"
        text = f"'{param}' has {len(prompt)} {unit}; the context of this model is {info.context_tokens} tokens."
        raise Refusal(Code.CONTEXT_LENGTH_EXCEEDED, text, param)


def _sampling(params: wire.SamplingParams, k: int) -> Sampling:
    """Choice `k` gets a seed of its own: with the same seed all choices would be identical."""
    seed = params.seed
    if seed is not None and k:
        seed = (seed - INT64_MIN + k) % 2**64 + INT64_MIN
    return Sampling(
        max_tokens=params.max_tokens,
        temperature=params.temperature,
        top_p=params.top_p,
        top_k=params.top_k,
        min_p=params.min_p,
        frequency_penalty=params.frequency_penalty,
        presence_penalty=params.presence_penalty,
        repetition_penalty=params.repetition_penalty,
        seed=seed,
        stop=params.stop,
        ignore_eos=params.ignore_eos,
        logprobs=params.logprobs,
        schema=params.schema,
    )
