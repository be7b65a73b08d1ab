"""The engine protocol: five methods, plain values in, plain values out.

An Engine lives in a child process of the worker and is driven by one single-threaded loop: `add` and `cancel`
what arrived, `step`, send the events. The values are msgspec structs because they also cross the pipe between
worker and child. One id is one sequence: the worker fans out `n` choices and batched inputs.
"""

from typing import Protocol

import msgspec

from forebay.core.errors import Code
from forebay.core.model import Task


class _Value(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """Base of everything that crosses the pipe."""


class Sampling(_Value, frozen=True):
    """Sampling parameters. `temperature` 0 is greedy; `seed` None lets the engine choose."""

    max_tokens: int | None = None
    """None: as many as fit the context."""
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
    """None: none; 0: of the chosen token; k: also of the k likeliest."""
    schema: str | None = None
    """JSON Schema (text) that the answer must satisfy; `{}`-like object schema for `json_object`."""


class Generate(_Value, frozen=True):
    """Continue a prompt, given as text (special tokens are recognised) or as token ids.

    `said` is text that another replica has generated for the same request: the answer continues right after it. It is
    tokenized separately from the prompt, as it was when it was generated. Its tokens count as generated: for
    `max_tokens`, for penalties, for stop strings that begin in them, and in `Finished`. Refused as NOT_RESUMABLE if
    that is impossible; `engines.sampling.check_said` has the cases.

    `blocks` are the names that routing uses for the blocks of the prompt, in order; each name also covers everything
    before it. Empty if cache contents are not to be reported.
    """

    id: str
    prompt: str | tuple[int, ...]
    sampling: Sampling
    said: str = ""
    blocks: tuple[int, ...] = ()


class Embed(_Value, frozen=True):
    """Turn one text (or its token ids) into a vector."""

    id: str
    input: str | tuple[int, ...]


class Tokenize(_Value, frozen=True):
    """Tokenize a text as a prompt (or input) of this model; `special`: with its special tokens."""

    id: str
    text: str
    special: bool = True


class Detokenize(_Value, frozen=True):
    """Turn tokens into text, special tokens included."""

    id: str
    tokens: tuple[int, ...]


Work = Generate | Embed | Tokenize | Detokenize


class TokenLogprob(_Value, frozen=True):
    """A token of the answer with its natural-log probability and, if asked, the likeliest alternatives."""

    token: str
    logprob: float
    bytes: tuple[int, ...]
    top: tuple[tuple[str, float, tuple[int, ...]], ...] = ()


class Begun(_Value, frozen=True):
    """The prompt of a sequence has been processed. Comes before its text, with figures that `Finished` will repeat.

    It allows billing for work on requests that never finish. `cached_tokens` None: unknown so far, or at all.
    """

    id: str
    prompt_tokens: int
    cached_tokens: int | None = None


class Delta(_Value, frozen=True):
    """New text of one sequence: valid Unicode, never part of a stop string. `tokens` counts the tokens behind it."""

    id: str
    text: str
    tokens: int
    logprobs: tuple[TokenLogprob, ...] = ()


class Finished(_Value, frozen=True):
    """A sequence ended. `reason` is OpenAI's: `stop` or `length`. `cached_tokens` None: the engine cannot say.

    `prompt_tokens` are those of the prompt alone; `completion_tokens` are those of the whole answer, of which an
    earlier replica may have said a part. `stop` is the stop string that ended it, if one did.
    """

    id: str
    reason: str
    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int | None = None
    stop: str | None = None


class Embedded(_Value, frozen=True):
    """The vector of one input: `vector` is little-endian float32."""

    id: str
    vector: bytes
    prompt_tokens: int


class Tokenized(_Value, frozen=True):
    """The tokens of a text."""

    id: str
    tokens: tuple[int, ...]


class Detokenized(_Value, frozen=True):
    """The text of tokens."""

    id: str
    text: str


class Failed(_Value, frozen=True):
    """One sequence failed or was refused; the others go on."""

    id: str
    code: Code
    text: str
    param: str | None = None


Answered = Tokenized | Detokenized
Event = Begun | Delta | Finished | Embedded | Failed | Answered


class EngineLoad(_Value, frozen=True):
    """The engine's load after a step. Unknown figures are None, never 0."""

    running: int = 0
    waiting: int = 0
    kv_used_tokens: int | None = None
    kv_total_tokens: int | None = None
    batch_size: int = 0
    batch_max: int = 0


class Cached(_Value, frozen=True):
    """Changes of the prefix cache, by the names in `Generate.blocks`. The cache starts empty."""

    stored: tuple[int, ...]
    removed: tuple[int, ...]


class Step(_Value, frozen=True):
    """The result of a step. `wait_s` 0: call again now; > 0: at the latest after that; None: idle until input."""

    events: tuple[Event, ...]
    load: EngineLoad
    wait_s: float | None
    cached: Cached | None = None


class EngineInfo(_Value, frozen=True):
    """What a loaded engine can do; capabilities are data.

    `honours` names the request parameters beyond the plain ones (`max_tokens`, `temperature`, `top_p`, `stop`) that
    the engine really honours: any of `seed`, `frequency_penalty`, `presence_penalty`, `repetition_penalty`, `top_k`,
    `min_p`, `logprobs`, `top_logprobs`, `json_schema`, `ignore_eos`. The worker refuses the others by name.
    """

    engine: str
    version: str
    task: Task
    context_tokens: int
    """Longest prompt plus answer."""
    concurrency: int
    """How many sequences run at once."""
    honours: tuple[str, ...] = ()
    kv_total_tokens: int | None = None
    dimensions: int | None = None
    """Length of an embedding."""
    chat_template: str | None = None
    """Jinja template; None: the model cannot chat."""
    special_tokens: dict[str, str] = {}
    """`bos_token`, `eos_token`, … as text, for the template."""
    blocks_exact: bool | None = None
    """Whether `Step.cached` is exact or inferred; None: not reported."""
    counts_said: bool = True
    """Whether frequency and presence penalties count the tokens of `Generate.said` too."""


class Engine(Protocol):
    """One loaded model. Not thread-safe; every call comes from one thread."""

    def load(self) -> EngineInfo:
        """Load and warm up the model. Raises `EngineBroken` with a text for the operator."""

    def add(self, work: Work, now: float) -> Answered | None:
        """Accept work. Raises `core.errors.Refusal` without any effect if it cannot be served.

        A `Tokenize` or `Detokenize` needs no step: it is answered at once and forgotten. A `Generate` that fails
        after this is reported by a `Failed` event. `now` is monotonic seconds.
        """

    def cancel(self, id: str) -> None:
        """Forget a sequence and free what it holds at once. Unknown ids are ignored; no event follows."""

    def step(self, now: float) -> Step:
        """Do one unit of work. Any exception means that the engine is broken and must be replaced."""

    def close(self) -> None:
        """Release everything."""


class EngineBroken(Exception):  # noqa: N818 - states the condition
    """The engine cannot start or continue; the text is for the operator."""
