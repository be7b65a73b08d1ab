"""What a gateway knows of a request when it has ended, and what its tokens were."""

from typing import NamedTuple

import msgspec

from forebay.wire.records import Decision


class Facts(msgspec.Struct, gc=False):
    """One finished request. The rest of what the audit log says is in `decision`."""

    decision: Decision
    path: str
    """The endpoint, without a query: keys are sent in queries too."""
    revision: str = ""
    """Of the replica that answered."""
    key: str = ""
    """Id of the API key, never the key."""
    client: str = ""
    """Address of the client."""
    prompt: bytes = b""
    """The body of the request; needed only where `Recorder.prompts` says so."""


class Used(NamedTuple):
    """Tokens of a request. `estimated`: no worker told them."""

    prompt: int
    completion: int
    cached: int
    estimated: bool


def used(told: tuple[int, int, int] | None, events: int, prompt_estimate: int) -> Used:
    """The tokens of a request that reached a replica.

    `told`: prompt, completion and cached tokens by a worker; of a resumed stream the last worker tells those of the
    whole. Without it, as of a cancelled stream: the events relayed, one token each, and what the prompt was taken for
    if any came. Nothing was used where nothing was answered.
    """
    if told is not None:
        return Used(*told, estimated=False)
    return Used(prompt_estimate if events else 0, events, 0, estimated=events > 0)
