"""What a gateway knows of a request when it has ended, and what its tokens were."""

from typing import Final

from forebay.wire.records import Decision


class Used:
    """Tokens of a request. `estimated`: no worker told all of them."""

    __slots__ = ("cached", "completion", "estimated", "prompt")

    def __init__(self, prompt: int, completion: int, cached: int, *, estimated: bool) -> None:
        self.prompt = prompt
        self.completion = completion
        self.cached = cached
        self.estimated = estimated


NOTHING: Final = Used(0, 0, 0, estimated=False)


class Facts:
    """One finished request."""

    __slots__ = ("client", "code", "decision", "key", "line", "model", "prompt", "revision", "spent", "tenant", "ts")

    def __init__(
        self,
        decision: Decision,
        line: bytes,
        spent: Used,
        *,
        revision: str = "",
        key: str = "",
        client: str = "",
        prompt: bytes = b"",
    ) -> None:
        self.decision = decision
        self.ts = decision.ts
        self.tenant = decision.tenant
        self.model = decision.model
        self.code = decision.code
        self.spent = spent
        self.line = line
        """That of the access log: the audit log says what it says."""
        self.revision = revision
        """Of the replica that answered."""
        self.key = key
        """Id of the API key, never the key."""
        self.client = client
        """Address of the client."""
        self.prompt = prompt
        """The body of the request; needed only where `Recorder.prompts` says so."""


def used(
    told: tuple[int, int, int] | None, begun: tuple[int, int, int | None], events: tuple[int, int], estimate: int
) -> Used:
    """The tokens of a request, wherever it has ended.

    `told`: prompt, completion and cached tokens by a worker; of a resumed stream the last worker tells those of the
    whole. Without it, as of a cancelled stream: the prompt by what was told when it had `begun`, or the `estimate`
    where that is nothing, and the relayed `events` with text, of all, one token each. Nothing was used where nothing
    was answered.
    """
    if told is not None:
        prompt, completion, cached = told
        return Used(prompt, completion, cached, estimated=False)
    relayed, with_text = events
    if not relayed:
        return Used(0, 0, 0, estimated=False)
    return Used(begun[0] or estimate, with_text, begun[2] or 0, estimated=True)
