"""What of a request's body the model is to read, as gateways and workers both see it: for every API the same bytes.

The body is scanned once and nothing is decoded: prompts stay the JSON that they are.
"""

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

    @property
    def text(self) -> memoryview:
        """The JSON of what the model is to read."""
        return memoryview(self.messages or self.prompt or self.input)


class Fields(Prompt, gc=False):
    """The fields of a body that a gateway reads, beside the prompt."""

    model: str
    stream: bool | None = None
    max_tokens: msgspec.Raw = NOTHING
    max_completion_tokens: msgspec.Raw = NOTHING
    max_output_tokens: msgspec.Raw = NOTHING


_decode = msgspec.json.Decoder(Prompt).decode


def put_in_order(body: Prompt) -> None:
    """Make one text of what the model reads, in its order, wherever the fields stand in the body."""
    first = body.system or body.instructions
    if first:
        body.messages = msgspec.Raw(b"".join((memoryview(first), body.text)))


def prompt_text(body: bytes) -> memoryview:
    """The JSON of what the model is to read. Raises msgspec.DecodeError or UnicodeDecodeError for what is no JSON."""
    prompt = _decode(body)
    put_in_order(prompt)
    return prompt.text
