"""What generating engines reject up front: invalid sampling values, and prompts and answers that do not fit."""

import math
from collections.abc import Sequence

from forebay.core.errors import Code, Refusal
from forebay.engines.protocol import Sampling

STOPS_MAX = 16
STOP_CHARS_MAX = 1024
LOGPROBS_MAX = 20
_SMALLEST = 1e-6


def check_sampling(sampling: Sampling, honours: Sequence[str]) -> None:
    """Raises `Refusal`, naming the field, for a value out of range or a parameter that the engine does not honour."""
    ranges = (
        ("max_tokens", sampling.max_tokens, 1, math.inf),
        ("temperature", sampling.temperature, 0, 2),
        ("top_p", sampling.top_p, _SMALLEST, 1),
        ("top_k", sampling.top_k, 1, math.inf),
        ("min_p", sampling.min_p, 0, 1),
        ("frequency_penalty", sampling.frequency_penalty, -2, 2),
        ("presence_penalty", sampling.presence_penalty, -2, 2),
        ("repetition_penalty", sampling.repetition_penalty, _SMALLEST, 1000),
        ("logprobs", sampling.logprobs, 0, LOGPROBS_MAX),
    )
    for name, value, low, high in ranges:
        if value is not None and not (low <= value <= high and math.isfinite(value)):
            text = f"`{name}` is {value}; it must be at least {low:g}" + (
                f" and at most {high:g}" if high < 1e9 else ""
            )
            raise Refusal(Code.INVALID_REQUEST, text, name)
    if len(sampling.stop) > STOPS_MAX:
        text = f"`stop` holds {len(sampling.stop)} strings; at most {STOPS_MAX} are allowed"
        raise Refusal(Code.INVALID_REQUEST, text, "stop")
    if any(not 1 <= len(stop) <= STOP_CHARS_MAX for stop in sampling.stop):
        text = f"every string of `stop` must have 1 to {STOP_CHARS_MAX} characters"
        raise Refusal(Code.INVALID_REQUEST, text, "stop")
    used = (
        ("seed", sampling.seed is not None),
        ("frequency_penalty", sampling.frequency_penalty != 0),
        ("presence_penalty", sampling.presence_penalty != 0),
        ("repetition_penalty", sampling.repetition_penalty is not None),
        ("top_k", sampling.top_k is not None),
        ("min_p", sampling.min_p is not None),
        ("logprobs", sampling.logprobs is not None),
        ("top_logprobs", bool(sampling.logprobs)),
        ("json_schema", sampling.schema is not None),
        ("ignore_eos", sampling.ignore_eos),
    )
    for name, asked in used:
        if asked and name not in honours:
            param = "response_format" if name == "json_schema" else name
            raise Refusal(Code.UNSUPPORTED_PARAMETER, f"the engine of this model cannot honour `{param}`", param)
    if sampling.schema is not None and sampling.ignore_eos:
        text = "`ignore_eos` cannot be combined with a JSON answer: a complete JSON text has an end"
        raise Refusal(Code.INVALID_REQUEST, text, "ignore_eos")


def check_said(sampling: Sampling, *, counts_said: bool) -> None:
    """Raises `Refusal` if an answer with this sampling cannot be resumed after another replica.

    No engine here can restore the state of a grammar. `counts_said`: frequency and presence penalties also count
    tokens of the resumed text, as if this engine had generated them.
    """
    if sampling.schema is not None:
        text = "an answer that must satisfy a JSON Schema cannot be continued by another replica"
        raise Refusal(Code.NOT_RESUMABLE, text, "response_format")
    for name, value in (
        ("frequency_penalty", sampling.frequency_penalty),
        ("presence_penalty", sampling.presence_penalty),
    ):
        if value and not counts_said:
            text = f"the engine of this model cannot continue an answer under `{name}`: it counts its own tokens only"
            raise Refusal(Code.NOT_RESUMABLE, text, name)


def resumable(sampling: Sampling, *, counts_said: bool) -> bool:
    """Whether another replica could resume an answer with this sampling, according to `check_said`."""
    try:
        check_said(sampling, counts_said=counts_said)
    except Refusal:
        return False
    return True


def check_spelling(said: str, spelt: str) -> None:
    """Raises `Refusal` if the tokens of `said` decode to other text, because the tokenizer normalises or interprets
    it.
    """
    if said != spelt:
        text = "the tokenizer of this model does not reproduce the text that the answer began with"
        raise Refusal(Code.NOT_RESUMABLE, text)


def check_text(content: str, piece_bytes_max: int, context_tokens: int, param: str = "prompt") -> None:
    """Raises `Refusal` for invalid text, or text too long to fit, whose tokenisation would stall other requests."""
    try:
        bytes_count = len(content.encode())
    except UnicodeEncodeError as error:
        text = f"`{param}` holds half of a surrogate pair, which is not a character"
        raise Refusal(Code.INVALID_REQUEST, text, param) from error
    if not content:
        raise Refusal(Code.INVALID_REQUEST, f"`{param}` is empty", param)
    tokens_min = bytes_count // max(1, piece_bytes_max)
    if tokens_min >= context_tokens:
        raise too_long(tokens_min, context_tokens, param)


def too_long(tokens_min: int, context_tokens: int, param: str = "prompt") -> Refusal:
    """The error for text that has at least this many tokens, without tokenising all of it."""
    text = f"`{param}` has at least {tokens_min} tokens; this model takes {context_tokens} for prompt and answer"
    return Refusal(Code.CONTEXT_LENGTH_EXCEEDED, text, param)


def check_tokens(ids: Sequence[int], vocabulary_size: int, param: str = "prompt") -> None:
    """Raises `Refusal` if `ids` is empty or holds an invalid token id; `param`: the field that they come from."""
    if not ids:
        raise Refusal(Code.INVALID_REQUEST, f"the {param} is empty; it must have at least one token", param)
    if min(ids) < 0 or max(ids) >= vocabulary_size:
        at, bad = next((at, id) for at, id in enumerate(ids) if not 0 <= id < vocabulary_size)
        text = f"the {param} holds token id {bad} at index {at}; ids of this model are 0 to {vocabulary_size - 1}"
        raise Refusal(Code.INVALID_REQUEST, text, param)


def answer_tokens_max(prompt_tokens: int, max_tokens: int | None, context_tokens: int) -> int:
    """Maximum tokens of the answer. Raises `Refusal` if the prompt, or prompt and answer, do not fit."""
    room = context_tokens - prompt_tokens
    if room < 1:
        text = (
            f"the prompt has {prompt_tokens} tokens; this model takes {context_tokens} for prompt and answer together"
        )
        raise Refusal(Code.CONTEXT_LENGTH_EXCEEDED, text, "prompt")
    if max_tokens is not None and max_tokens > room:
        text = (
            f"the prompt has {prompt_tokens} tokens and `max_tokens` asks for {max_tokens}; this model takes "
            f"{context_tokens} for both together, so `max_tokens` can be at most {room}"
        )
        raise Refusal(Code.CONTEXT_LENGTH_EXCEEDED, text, "max_tokens")
    return room if max_tokens is None else max_tokens
