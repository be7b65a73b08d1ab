"""The shapes of answers, for documents: nothing is encoded by these, tests hold real answers against them.

Names and meanings are those of the public APIs of OpenAI and Anthropic, and of vLLM for tokens.
"""

from typing import Annotated, Literal

import msgspec
from msgspec import Meta, Struct

from forebay.core.errors import Code

Count = Annotated[int, Meta(ge=0)]
Finish = Literal["stop", "length"]
Status = Literal["in_progress", "completed", "incomplete"]


class Closed(Struct, forbid_unknown_fields=True):
    """An object without fields beyond those named."""


class ServerSentEvent(Closed):
    """One event of a stream: `data` is an object as JSON, or `[DONE]` at the end of a stream of completions."""

    data: str
    event: str | msgspec.UnsetType = msgspec.UNSET


# --- errors


class Problem(Closed):
    """What is wrong; `param` is the field of the request that it is about."""

    message: str
    type: str
    param: str | None
    code: Code


class Error(Closed):
    """An error, as OpenAI's API words it."""

    error: Problem


class ProblemCode(Closed):
    """The code, where Anthropic's clients look for it."""

    error_code: Code


class MessagesProblem(Closed):
    """What is wrong, with one of Anthropic's types."""

    type: str
    message: str
    param: str | None
    code: Code
    details: ProblemCode


class MessagesError(Closed):
    """An error, as Anthropic's API words it."""

    type: Literal["error"]
    error: MessagesProblem


# --- chat completions and completions


class CachedTokens(Closed):
    """How many tokens of the prompt came out of a cache."""

    cached_tokens: Count


class Usage(Closed):
    """Tokens of a request. Without details the engine cannot say what its cache knew."""

    prompt_tokens: Count
    completion_tokens: Count
    total_tokens: Count
    prompt_tokens_details: CachedTokens | msgspec.UnsetType = msgspec.UNSET


class TopLogprob(Closed):
    """A token that could have stood here, with the natural logarithm of its probability."""

    token: str
    logprob: float
    bytes: list[int]


class TokenLogprob(TopLogprob):
    """A token of the answer, and the likeliest ones in its place."""

    top_logprobs: list[TopLogprob]


class ChatLogprobs(Closed):
    """Log probabilities of a chat choice."""

    content: list[TokenLogprob]
    refusal: None


class ChatMessage(Closed):
    """The message that the model wrote."""

    role: Literal["assistant"]
    content: str
    refusal: None
    annotations: Annotated[list[str], Meta(max_length=0)]


class ChatChoice(Closed):
    """One choice of a chat completion."""

    index: Count
    message: ChatMessage
    logprobs: ChatLogprobs | None
    finish_reason: Finish


class ChatCompletion(Closed):
    """An answer of `/v1/chat/completions`."""

    id: str
    object: Literal["chat.completion"]
    created: int
    model: str
    system_fingerprint: str
    choices: list[ChatChoice]
    usage: Usage


class CompletionLogprobs(Closed):
    """Log probabilities of a completion choice."""

    tokens: list[str]
    token_logprobs: list[float]
    top_logprobs: list[dict[str, float]] | None
    text_offset: list[Count]


class CompletionChoice(Closed):
    """One choice of a completion; choice `k` of prompt `i` has index `i * n + k`."""

    text: str
    index: Count
    logprobs: CompletionLogprobs | None
    finish_reason: Finish


class Completion(Closed):
    """An answer of `/v1/completions`."""

    id: str
    object: Literal["text_completion"]
    created: int
    model: str
    system_fingerprint: str
    choices: list[CompletionChoice]
    usage: Usage


# --- embeddings and tokens


class EmbeddingItem(Closed):
    """The vector of one input: numbers, or little-endian floats of 32 bits in base64."""

    object: Literal["embedding"]
    index: Count
    embedding: list[float] | str


class EmbeddingUsage(Closed):
    """Tokens of an embeddings request."""

    prompt_tokens: Count
    total_tokens: Count


class Embeddings(Closed):
    """An answer of `/v1/embeddings`; its items are in the order of the inputs."""

    object: Literal["list"]
    data: list[EmbeddingItem]
    model: str
    usage: EmbeddingUsage


class Tokens(Closed):
    """An answer of `/v1/tokenize`. `max_model_len`: the tokens that prompt and answer may have together."""

    tokens: list[Count]
    count: Count
    max_model_len: Count


class Detokenized(Closed):
    """An answer of `/v1/detokenize`."""

    prompt: str


# --- messages


class TextBlock(Closed):
    """A part of a message."""

    type: Literal["text"]
    text: str


class MessageUsage(Closed):
    """Tokens of a message; `input_tokens` are those that no cache knew."""

    input_tokens: Count
    cache_creation_input_tokens: None
    cache_read_input_tokens: Count | None
    output_tokens: Count


class Message(Closed):
    """An answer of `/v1/messages`."""

    id: str
    type: Literal["message"]
    role: Literal["assistant"]
    model: str
    content: list[TextBlock]
    stop_reason: Literal["end_turn", "max_tokens", "stop_sequence"]
    stop_sequence: str | None
    usage: MessageUsage


class InputTokens(Closed):
    """An answer of `/v1/messages/count_tokens`."""

    input_tokens: Count


# --- responses


class OutputText(Closed):
    """A part of an output message."""

    type: Literal["output_text"]
    text: str
    annotations: Annotated[list[str], Meta(max_length=0)]
    logprobs: Annotated[list[str], Meta(max_length=0)]


class OutputMessage(Closed):
    """The message that the model wrote."""

    id: str
    type: Literal["message"]
    status: Status
    role: Literal["assistant"]
    content: list[OutputText]


class InputDetails(Closed):
    """How many tokens a cache knew, and how many were written to one."""

    cached_tokens: Count
    cache_write_tokens: Count


class OutputDetails(Closed):
    """How many tokens nobody gets to see."""

    reasoning_tokens: Count


class ResponseUsage(Closed):
    """Tokens of a response."""

    input_tokens: Count
    input_tokens_details: InputDetails
    output_tokens: Count
    output_tokens_details: OutputDetails
    total_tokens: Count


class Incomplete(Closed):
    """Why a response is incomplete."""

    reason: Literal["max_output_tokens"]


class ResponseText(Closed):
    """The format of the text, as the request gave it."""

    format: dict[str, msgspec.Raw]


class Response(Closed):
    """An answer of `/v1/responses`."""

    id: str
    object: Literal["response"]
    created_at: int
    status: Status
    background: Literal[False]
    error: None
    incomplete_details: Incomplete | None
    model: str
    output: list[OutputMessage]
    parallel_tool_calls: Literal[True]
    previous_response_id: None
    store: Literal[False]
    tool_choice: Literal["auto"]
    tools: Annotated[list[str], Meta(max_length=0)]
    truncation: Literal["disabled"]
    usage: ResponseUsage
    instructions: str | None
    max_output_tokens: int | None
    metadata: dict[str, str]
    temperature: float
    text: ResponseText
    top_p: float
    user: str | None


# --- models and health


class Model(Closed):
    """A name that requests may give, as OpenAI tells it and as Anthropic does. `parent`: what an alias stands for.

    `task` is missing where the name leads to models of several.
    """

    id: str
    object: Literal["model"]
    created: int
    owned_by: str
    type: Literal["model"]
    display_name: str
    created_at: str
    task: str | msgspec.UnsetType = msgspec.UNSET
    parent: str | msgspec.UnsetType = msgspec.UNSET


class ModelList(Closed):
    """An answer of `/v1/models`."""

    object: Literal["list"]
    data: list[Model]
    has_more: Literal[False]
    first_id: str | None
    last_id: str | None


class NotServed(Closed):
    """A model that cannot be served now, and why; no name: none is known yet."""

    model: str
    reason: str


class Readiness(Closed):
    """An answer of `/readyz`."""

    status: Literal["ready", "not ready", "draining"]
    missing: list[NotServed] | msgspec.UnsetType = msgspec.UNSET
