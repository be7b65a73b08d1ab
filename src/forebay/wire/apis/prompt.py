"""The fields of a request body that gateways and workers read. Their values stay undecoded JSON."""

from typing import Final

import msgspec

NOTHING: Final = msgspec.Raw(b"")


class Prompt(msgspec.Struct, gc=False, kw_only=True):
    """The fields of a body that hold its prompt."""

    messages: msgspec.Raw = NOTHING
    prompt: msgspec.Raw = NOTHING
    input: msgspec.Raw = NOTHING
    system: msgspec.Raw = NOTHING
    """Precedes the messages, in Anthropic's Messages API."""
    instructions: msgspec.Raw = NOTHING
    """Precedes the input, in OpenAI's Responses API."""


class Fields(Prompt, gc=False):
    """The fields of a body that a gateway reads besides the prompt."""

    model: str
    stream: bool | None = None
    max_tokens: msgspec.Raw = NOTHING
    max_completion_tokens: msgspec.Raw = NOTHING
    max_output_tokens: msgspec.Raw = NOTHING
    n: msgspec.Raw = NOTHING
    best_of: msgspec.Raw = NOTHING
