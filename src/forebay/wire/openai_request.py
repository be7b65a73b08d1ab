"""OpenAI's request bodies as values: chat completions, completions, embeddings.

Follows OpenAI's public API; `top_k`, `min_p`, `repetition_penalty` and `ignore_eos` are as in vLLM. Fields of
OpenAI's API that Forebay does not support are rejected by name, unless their value changes nothing.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from forebay.core.errors import Code, Refusal
from forebay.wire.openai_fields import (
    INT64_MAX,
    INT64_MIN,
    Reader,
    anything,
    array_shape,
    boolean,
    decode,
    format_name,
    ignored_text,
    integer,
    invalid,
    json_schema,
    metadata,
    missing,
    nested,
    number,
    object_shape,
    one_of,
    only,
    read,
    shape_of,
    shaped,
    shown,
    text,
    texts,
    unsupported,
)

MESSAGES_MAX = 2048
CHOICES_MAX = 8
PROMPTS_MAX = 128
INPUTS_MAX = 2048
STOPS_MAX = 4
STOP_CHARS_MAX = 512
TOP_LOGPROBS_MAX = 20
COMPLETION_LOGPROBS_MAX = 5
COMPLETION_TOKENS_DEFAULT = 16
TOKEN_ID_MAX = 2**31 - 1
TOKENS_MAX = 2**31 - 1
REPETITION_PENALTY_MAX = 10.0
ANY_OBJECT_SCHEMA = '{"type":"object"}'

Input = str | tuple[int, ...]


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """Sampling parameters; see `engines.protocol.Sampling` for the meaning of each."""

    max_tokens: int | None = None
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int | None = None
    min_p: float | None = None
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    repetition_penalty: float | None = None
    seed: int | None = None
    stop: tuple[str, ...] = ()
    ignore_eos: bool = False
    logprobs: int | None = None
    schema: str | None = None


@dataclass(frozen=True, slots=True)
class ChatRequest:
    """`POST /v1/chat/completions`. Every message has `role` and `content`, some also `name`.

    `limit_name`: the field that `sampling.max_tokens` is from.
    """

    model: str
    messages: tuple[dict[str, str], ...]
    sampling: SamplingParams
    n: int = 1
    stream: bool = False
    include_usage: bool = False
    limit_name: str = "max_tokens"


@dataclass(frozen=True, slots=True)
class CompletionRequest:
    """`POST /v1/completions`. `n` choices for each prompt; choice `k` of prompt `i` has index `i * n + k`."""

    model: str
    prompts: tuple[Input, ...]
    sampling: SamplingParams
    n: int = 1
    stream: bool = False
    include_usage: bool = False
    echo: bool = False


@dataclass(frozen=True, slots=True)
class EmbeddingsRequest:
    """`POST /v1/embeddings`."""

    model: str
    inputs: tuple[Input, ...]
    base64: bool = False
    dimensions: int | None = None


def parse_chat(body: bytes) -> ChatRequest:
    """Parse a chat completion request. Raises `Refusal`."""
    given = CHAT_BODY(decode(body), "")
    limit, old_limit = given.get("max_completion_tokens"), given.get("max_tokens")
    if limit is not None and old_limit is not None and limit != old_limit:
        raise Refusal(
            Code.INVALID_REQUEST,
            f"'max_tokens' ({old_limit}) and 'max_completion_tokens' ({limit}) differ: send only the latter.",
            "max_tokens",
        )
    logprobs = given.get("top_logprobs", 0) if given.get("logprobs") else None
    if logprobs is None and "top_logprobs" in given:
        raise Refusal(Code.INVALID_REQUEST, "'top_logprobs' needs 'logprobs': true.", "top_logprobs")
    schema = given.get("response_format")
    sampling = _sampling(given, limit if limit is not None else old_limit, logprobs, schema)
    return ChatRequest(
        given["model"],
        given["messages"],
        sampling,
        given.get("n", 1),
        given.get("stream", False),
        _usage(given),
        limit_name="max_tokens" if limit is None else "max_completion_tokens",
    )


def parse_completion(body: bytes) -> CompletionRequest:
    """Parse a text completion request. Raises `Refusal`."""
    given = COMPLETION_BODY(decode(body), "")
    prompts, n, echo = given["prompt"], given.get("n", 1), given.get("echo", False)
    if given.get("best_of", n) != n:
        unsupported("best_of", f"found {shown(given['best_of'])}; leave it out or send the value of 'n'.")
    logprobs = given.get("logprobs")
    if echo and logprobs is not None:
        unsupported("echo", "log probabilities of the prompt are not available; leave out 'echo' or 'logprobs'.")
    if echo and any(type(prompt) is tuple for prompt in prompts):
        unsupported("echo", "the prompt is an array of tokens; send it as text.")
    sampling = _sampling(given, given.get("max_tokens", COMPLETION_TOKENS_DEFAULT), logprobs, None)
    return CompletionRequest(given["model"], prompts, sampling, n, given.get("stream", False), _usage(given), echo)


def parse_embeddings(body: bytes) -> EmbeddingsRequest:
    """Parse an embeddings request. Raises `Refusal`."""
    given = EMBEDDINGS_BODY(decode(body), "")
    return EmbeddingsRequest(
        given["model"], given["input"], given.get("encoding_format") == "base64", given.get("dimensions")
    )


def needs(request: ChatRequest | CompletionRequest) -> Iterator[tuple[str, str]]:
    """The optional engine capabilities the request needs: pairs of capability and the parameter that needs it."""
    s, chat = request.sampling, isinstance(request, ChatRequest)
    if s.seed is not None:
        yield "seed", "seed"
    if s.frequency_penalty:
        yield "frequency_penalty", "frequency_penalty"
    if s.presence_penalty:
        yield "presence_penalty", "presence_penalty"
    if s.repetition_penalty is not None:
        yield "repetition_penalty", "repetition_penalty"
    if s.top_k is not None:
        yield "top_k", "top_k"
    if s.min_p is not None:
        yield "min_p", "min_p"
    if s.ignore_eos:
        yield "ignore_eos", "ignore_eos"
    if s.logprobs is not None:
        yield "logprobs", "logprobs"
    if s.logprobs:
        yield "top_logprobs", "top_logprobs" if chat else "logprobs"
    if s.schema is not None:
        yield "json_schema", "response_format"


def _sampling(given: dict[str, Any], limit: int | None, logprobs: int | None, schema: str | None) -> SamplingParams:
    top_k, min_p, repetition = given.get("top_k"), given.get("min_p"), given.get("repetition_penalty")
    return SamplingParams(
        max_tokens=limit,
        temperature=given.get("temperature", 1.0),
        top_p=given.get("top_p", 1.0),
        top_k=top_k if top_k is not None and top_k > 0 else None,
        min_p=min_p or None,
        frequency_penalty=given.get("frequency_penalty", 0.0),
        presence_penalty=given.get("presence_penalty", 0.0),
        repetition_penalty=None if repetition == 1.0 else repetition,
        seed=given.get("seed"),
        stop=given.get("stop", ()),
        ignore_eos=given.get("ignore_eos", False),
        logprobs=logprobs,
        schema=schema,
    )


def _usage(given: dict[str, Any]) -> bool:
    """Whether the stream ends with a usage chunk."""
    options: dict[str, Any] | None = given.get("stream_options")
    if options is not None and not given.get("stream", False):
        raise Refusal(Code.INVALID_REQUEST, "'stream_options' needs 'stream': true.", "stream_options")
    return bool(options and options.get("include_usage", False))


def messages(value: Any, path: str) -> tuple[dict[str, str], ...]:
    """Reads the messages of a chat."""
    if type(value) is not list or not 0 < len(value) <= MESSAGES_MAX:
        invalid(path, f"an array of 1 to {MESSAGES_MAX} messages", value)
    return tuple([_message(one, f"{path}[{i}]") for i, one in enumerate(value)])


def _message(value: Any, path: str) -> dict[str, str]:
    if type(value) is dict and value.get("role") in ("tool", "function"):
        unsupported(f"{path}.role", f"found {shown(value['role'])}; this API takes no tool results yet.")
    if type(value) is dict and value.get("content") is None:  # as in messages that call tools: name those, not it
        for field in ("tool_calls", "function_call"):
            if value.get(field) is not None:
                _MESSAGE[field](value[field], f"{path}.{field}")
    given = read(value, path, _MESSAGE, ("role", "content"))
    if given["role"] == "developer":
        given["role"] = "system"  # OpenAI's newer name of the role; chat templates only know the older one
    return {key: given[key] for key in ("role", "content", "name") if key in given}


def _part(value: Any, path: str) -> str:
    kind = value.get("type") if type(value) is dict else None
    if type(kind) is str and kind in ("image_url", "input_audio", "file", "refusal"):
        unsupported(f"{path}.type", f"found {shown(kind)}; this model reads text only.")
    part: str = read(value, path, _PART, ("type", "text"))["text"]
    return part


def _stop(value: Any, path: str) -> tuple[str, ...]:
    if type(value) is str:
        return (_STOP(value, path),)
    if type(value) is not list or len(value) > STOPS_MAX:
        invalid(path, f"a string or an array of at most {STOPS_MAX} strings", value)
    return tuple([_STOP(one, f"{path}[{i}]") for i, one in enumerate(value)])


def _inputs(items_max: int) -> Reader:
    """A text, several texts, an array of tokens, or several of those."""
    expected = f"a string, an array of tokens, or an array of 1 to {items_max} of either kind"

    def reader(value: Any, path: str) -> tuple[Input, ...]:
        if type(value) is str:
            return (_TEXT_INPUT(value, path),)
        if type(value) is not list or not value:
            invalid(path, expected, value)
        if type(value[0]) is int:
            return (tokens(value, path),)
        if len(value) > items_max:
            invalid(path, expected, value)
        if type(value[0]) is list:
            return tuple([tokens(one, f"{path}[{i}]") for i, one in enumerate(value)])
        return tuple([_TEXT_INPUT(one, f"{path}[{i}]") for i, one in enumerate(value)])

    one, many = shape_of(_TEXT_INPUT), shape_of(tokens)
    several = [array_shape(each, 1, items_max) for each in (one, many)]
    return shaped(reader, {"anyOf": [one, many, *several]})


def tokens(value: Any, path: str) -> tuple[int, ...]:
    """Reads an array of token ids."""
    if type(value) is not list or not value:
        invalid(path, "an array of one token or more", value)
    if set(map(type, value)) != {int} or min(value) < 0 or max(value) > TOKEN_ID_MAX:
        for i, one in enumerate(value):
            _TOKEN(one, f"{path}[{i}]")
    return tuple(value)


def _response_format(value: Any, path: str) -> str | None:
    """The schema as text; None for plain text."""
    kind = value.get("type") if type(value) is dict else None
    if kind != "json_schema":
        kind = read(value, path, _FORMAT, ("type",))["type"]
        return ANY_OBJECT_SCHEMA if kind == "json_object" else None
    given = read(value, path, _SCHEMA_FORMAT, ("type", "json_schema"))["json_schema"]
    if "schema" not in given:
        missing(f"{path}.json_schema.schema")
    schema: str = given["schema"]
    return schema


_STOP = text(1, STOP_CHARS_MAX)
_TEXT_INPUT = text(1)
_TOKEN = integer(0, TOKEN_ID_MAX)
_ANY_TEXT = text()
shaped(_stop, {"anyOf": [shape_of(_STOP), array_shape(shape_of(_STOP), 0, STOPS_MAX)]})
shaped(tokens, array_shape(shape_of(_TOKEN), 1))

_PART: dict[str, Reader] = {"type": one_of("text"), "text": _ANY_TEXT, "prompt_cache_breakpoint": only()}
shaped(_part, object_shape(_PART, ("type", "text")))
_MESSAGE: dict[str, Reader] = {
    "role": one_of("system", "developer", "user", "assistant"),
    "content": texts(_part),
    "name": text(1),
    "refusal": only(),
    "audio": only(),
    "annotations": only([]),
    "function_call": only(),
    "tool_calls": only([]),
    "parsed": anything,  # what OpenAI's clients add to an answer in JSON, and send back with it
}
shaped(messages, array_shape(object_shape(_MESSAGE, ("role", "content")), 1, MESSAGES_MAX))
_FORMAT: dict[str, Reader] = {"type": one_of("text", "json_object", "json_schema")}
_SCHEMA_FORMAT: dict[str, Reader] = {
    "type": one_of("json_schema"),
    "json_schema": nested(
        {"name": format_name, "description": _ANY_TEXT, "schema": json_schema, "strict": boolean}, required=("name",)
    ),
}
_FORMAT_SHAPES = [object_shape(_FORMAT, ("type",)), object_shape(_SCHEMA_FORMAT, ("type", "json_schema"))]
shaped(_response_format, {"anyOf": _FORMAT_SHAPES})
_STREAM_OPTIONS: dict[str, Reader] = {"include_usage": boolean, "include_obfuscation": only(False)}
_SHARED: dict[str, Reader] = {
    "model": text(1),
    "n": integer(1, CHOICES_MAX),
    "max_tokens": integer(1, TOKENS_MAX),
    "temperature": number(0, 2),
    "top_p": number(0, 1, above=True),
    "frequency_penalty": number(-2, 2),
    "presence_penalty": number(-2, 2),
    "seed": integer(INT64_MIN, INT64_MAX),
    "stop": _stop,
    "stream": boolean,
    "stream_options": nested(_STREAM_OPTIONS),
    "user": ignored_text,
    "logit_bias": only({}),
    "top_k": integer(-1, TOKENS_MAX),
    "min_p": number(0, 1),
    "repetition_penalty": number(0, REPETITION_PENALTY_MAX, above=True),
    "ignore_eos": boolean,
}
_CHAT: dict[str, Reader] = _SHARED | {
    "messages": messages,
    "max_completion_tokens": integer(1, TOKENS_MAX),
    "logprobs": boolean,
    "top_logprobs": integer(0, TOP_LOGPROBS_MAX),
    "response_format": _response_format,
    "metadata": metadata,
    "safety_identifier": ignored_text,
    "prompt_cache_key": ignored_text,
    "audio": only(),
    "function_call": only("none", "auto"),
    "functions": only([]),
    "modalities": only(["text"]),
    "moderation": only(),
    "parallel_tool_calls": boolean,
    "prediction": only(),
    "prompt_cache_options": nested({"mode": only("implicit"), "ttl": only()}),
    "prompt_cache_retention": only("in_memory"),
    "reasoning_effort": only("none"),
    "service_tier": only("auto", "default"),
    "store": only(False),
    "tool_choice": only("none", "auto"),
    "tools": only([]),
    "verbosity": only("medium"),
    "web_search_options": only(),
}
_COMPLETION: dict[str, Reader] = _SHARED | {
    "prompt": _inputs(PROMPTS_MAX),
    "best_of": integer(1, TOP_LOGPROBS_MAX),
    "echo": boolean,
    "logprobs": integer(0, COMPLETION_LOGPROBS_MAX),
    "suffix": only(""),
}
_EMBEDDINGS: dict[str, Reader] = {
    "model": text(1),
    "input": _inputs(INPUTS_MAX),
    "encoding_format": one_of("float", "base64"),
    "dimensions": integer(1, TOKENS_MAX),
    "user": ignored_text,
}
CHAT_BODY = nested(_CHAT, ("model", "messages"))
COMPLETION_BODY = nested(_COMPLETION, ("model", "prompt"))
EMBEDDINGS_BODY = nested(_EMBEDDINGS, ("model", "input"))
