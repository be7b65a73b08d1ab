"""The events of streamed responses, as far as a gateway parses them to continue a stream on another replica."""

import msgspec


class Delta(msgspec.Struct):
    """The new content of a chat choice."""

    content: str | None = None
    tool_calls: list[msgspec.Raw] | None = None
    function_call: msgspec.Raw | None = None


class Choice(msgspec.Struct):
    """The new content of one choice."""

    index: int = 0
    delta: Delta | None = None
    text: str | None = None
    finish_reason: str | None = None


class Chunk(msgspec.Struct):
    """An event of chat or text completions."""

    id: str
    created: int
    choices: list[Choice]


class Begun(msgspec.Struct):
    """The start of a message or a response."""

    id: str
    created_at: int = 0


class TextDelta(msgspec.Struct, tag_field="type", tag="text_delta"):
    """The new text of a content block."""

    text: str


class Named(msgspec.Struct):
    """An event of the Messages or the Responses API."""

    type: str
    message: Begun | None = None
    response: Begun | None = None
    index: int = 0
    output_index: int = 0
    content_index: int = 0
    delta: TextDelta | str | None = None


read_chunk = msgspec.json.Decoder(Chunk).decode
read_named = msgspec.json.Decoder(Named).decode
