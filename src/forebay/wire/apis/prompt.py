"""The fields of a request's body that gateways and workers read. Nothing is decoded: prompts stay JSON."""

from typing import Final

import msgspec

NOTHING: Final = msgspec.Raw(b"")


class Prompt(msgspec.Struct, gc=False, kw_only=True):
    """The fields of a body that hold its prompt."""

    messages: msgspec.Raw = NOTHING
    prompt: msgspec.Raw = NOTHING
    input: msgspec.Raw = NOTHING
    system: msgspec.Raw = NOTHING
    """What stands before the messages of Anthropic's Messages."""
    instructions: msgspec.Raw = NOTHING
    """What stands before the input of OpenAI's Responses."""


class Fields(Prompt, gc=False):
    """The fields of a body that a gateway reads, beside the prompt."""

    model: str
    stream: bool | None = None
    max_tokens: msgspec.Raw = NOTHING
    max_completion_tokens: msgspec.Raw = NOTHING
    max_output_tokens: msgspec.Raw = NOTHING
    n: msgspec.Raw = NOTHING
    best_of: msgspec.Raw = NOTHING
