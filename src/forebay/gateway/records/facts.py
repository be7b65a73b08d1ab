"""What a gateway knows of a finished request, and how many tokens it used."""

from typing import Final

from forebay.wire.records import Decision


class Used:
    """Tokens of a request. `estimated`: no worker reported all of them."""

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
        """Its access log line, which the audit log includes."""
        self.revision = revision
        """That of the replica that answered."""
        self.key = key
        """Id of the API key, never the key."""
        self.client = client
        """Address of the client."""
        self.prompt = prompt
        """The request body; set only if `Recorder.prompts` is true."""


def used(
    reported: tuple[int, int, int] | None, begun: tuple[int, int, int | None], events: tuple[int, int], estimate: int
) -> Used:
    """The tokens of a request, however it ended.

    `reported`: prompt, completion and cached tokens by a worker; for a resumed stream the last worker reports the
    totals. Without it, as for a cancelled stream: the prompt tokens reported when the stream began (`begun`), or else
    the `estimate`, and one token per relayed event with text. `events`: all relayed events, and those with text.
    Without any event nothing was used.
    """
    if reported is not None:
        prompt, completion, cached = reported
        return Used(prompt, completion, cached, estimated=False)
    relayed, with_text = events
    if not relayed:
        return Used(0, 0, 0, estimated=False)
    return Used(begun[0] or estimate, with_text, begun[2] or 0, estimated=True)
