"""The paths that replicas serve."""

from typing import Final, NamedTuple

from forebay.core.model import Task
from forebay.net.replica_protocol import GATEWAY
from forebay.wire.openai_request import COMPLETION_TOKENS_DEFAULT


class Endpoint(NamedTuple):
    """A path that replicas serve, and the start of the upstream request for it.

    `also`: models of these tasks serve it, too. `runs`: it runs the model, not just its
    tokenizer. `model` is set if it is part of the path. `tokens_default`: most tokens of a choice if the request sets
    no limit; 0: the model decides.
    """

    path: str
    task: Task
    head: bytes
    also: tuple[Task, ...] = ()
    runs: bool = True
    method: bytes = b"POST"
    model: str = ""
    tokens_default: int = 0


def _endpoint(
    path: str, task: Task, *, also: tuple[Task, ...] = (), runs: bool = True, tokens_default: int = 0
) -> Endpoint:
    head = f"POST {path} HTTP/1.1\r\nhost: forebay\r\ncontent-type: application/json\r\n"
    head += f"{GATEWAY.decode()}: 1\r\nx-request-id: "
    return Endpoint(path, task, head.encode(), also, runs, tokens_default=tokens_default)


ENDPOINTS: Final = {
    b"/v1/chat/completions": _endpoint("/v1/chat/completions", Task.CHAT),
    b"/v1/completions": _endpoint("/v1/completions", Task.CHAT, tokens_default=COMPLETION_TOKENS_DEFAULT),
    b"/v1/embeddings": _endpoint("/v1/embeddings", Task.EMBED, also=(Task.TENSOR,)),  # only replicas know which
    b"/v1/messages": _endpoint("/v1/messages", Task.CHAT),
    b"/v1/messages/count_tokens": _endpoint("/v1/messages/count_tokens", Task.CHAT, runs=False),
    b"/v1/responses": _endpoint("/v1/responses", Task.CHAT),
    b"/v1/tokenize": _endpoint("/v1/tokenize", Task.CHAT, also=(Task.EMBED,), runs=False),
    b"/v1/detokenize": _endpoint("/v1/detokenize", Task.CHAT, also=(Task.EMBED,), runs=False),
}
