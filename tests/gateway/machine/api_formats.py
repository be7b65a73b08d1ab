"""Answers of the three streaming APIs: what replicas say, event by event, and what clients read of it."""

from functools import lru_cache
from typing import Final

import msgspec

from forebay.wire.apis.messages_answer import MessagesAnswer
from forebay.wire.apis.responses_answer import ResponsesAnswer
from forebay.wire.openai_answer import DONE, ChatAnswer, Head, Usage

CHAT, MESSAGES, RESPONSES = b"/v1/chat/completions", b"/v1/messages", b"/v1/responses"
EMBED, COUNT, TOKENIZE = b"/v1/embeddings", b"/v1/messages/count_tokens", b"/v1/tokenize"
HEDGEABLE: Final = frozenset({EMBED, COUNT, TOKENIZE})
"""Short requests without side effects."""
WORDS = tuple(f" w{n}" for n in range(400))
"""Every answer is as many of these as its replica says."""
NOISE: Final = b"data: 7\n\n"
"""An event that nobody can make sense of, nor go on after."""


class Voice:
    """The events of an answer to a request of `path`; `seam`: where it goes on, the value of x-forebay-continue."""

    def __init__(self, path: bytes, request_id: str, model: str, said: str = "", seam: bytes | None = None) -> None:
        id, created, _, events = seam.decode().split(",") if seam is not None else (f"id-{request_id}", "7", 0, "0")
        self.words = said.count("w")
        assert said == "".join(WORDS[: self.words]), "a stream does not go on where it was lost"
        sent, head = int(events), Head(id, int(created), model, "r")
        self._answer: ChatAnswer | MessagesAnswer | ResponsesAnswer
        if path == MESSAGES:
            self._answer = MessagesAnswer(head, sent)
        elif path == RESPONSES:
            self._answer = ResponsesAnswer(head, f"msg-{request_id}", {}, said, sent)
        else:
            self._answer = ChatAnswer(head, stream=True, begun=said if seam is not None else None)

    def opening(self) -> bytes:
        return self._answer.opening(0)

    def word(self) -> bytes:
        self.words += 1
        return self._answer.delta(0, WORDS[self.words - 1])

    def half_a_word(self) -> bytes:
        return self._answer.delta(0, "never whole")[:-5]

    def finish(self) -> bytes:
        """The text is complete."""
        return self._answer.finish(0, "stop", None)

    def end(self) -> bytes:
        return self._answer.end(Usage(11, self.words + 1, 4))


@lru_cache(maxsize=1000)
def told_at_once(path: bytes, request_id: str, model: str, words: int) -> bytes:
    """The whole stream, from one replica that nothing happened to."""
    voice = Voice(path, request_id, model)
    return b"".join((voice.opening(), *(voice.word() for _ in range(words)), voice.finish(), voice.end()))


def words_in(stream: bytes) -> int:
    """How many words a client was told, which must be the first ones, each of them once."""
    text = ""
    for event in stream.split(b"\n\n"):
        name, _, data = event.rpartition(b"data: ")
        if data.startswith(b'{"id"'):
            for choice in msgspec.json.decode(data)["choices"]:
                text += choice["delta"].get("content") or ""
        elif name.startswith(b"event: content_block_delta"):
            text += msgspec.json.decode(data)["delta"]["text"]
        elif name.startswith(b"event: response.output_text.delta"):
            text += msgspec.json.decode(data)["delta"]
    count = text.count("w")
    assert text == "".join(WORDS[:count]), f"words were lost or repeated: {text!r}"
    return count


def ends_in(stream: bytes) -> int:
    """How often a client was told that the stream is complete."""
    return sum(stream.count(end) for end in (DONE, b"event: message_stop\n", b"event: response.completed\n"))
