"""The events of streamed answers, as far as a gateway reads them to go on with a stream elsewhere."""

import msgspec


class Delta(msgspec.Struct):
    """What a choice of a chat says anew."""

    content: str | None = None
    tool_calls: list[msgspec.Raw] | None = None
    function_call: msgspec.Raw | None = None


class Choice(msgspec.Struct):
    """What one of several answers says anew."""

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
    """A message or a response that begins."""

    id: str
    created_at: int = 0


class TextDelta(msgspec.Struct, tag_field="type", tag="text_delta"):
    """What a content block says anew."""

    text: str


class Named(msgspec.Struct):
    """An event of Messages or of Responses."""

    type: str
    message: Begun | None = None
    response: Begun | None = None
    index: int = 0
    output_index: int = 0
    content_index: int = 0
    delta: TextDelta | str | None = None


read_chunk = msgspec.json.Decoder(Chunk).decode
read_named = msgspec.json.Decoder(Named).decode
