"""What the usage ledger keeps in files. Values only."""

import msgspec


class Sums(msgspec.Struct, gc=False):
    """What adds up. `estimated` are requests whose tokens are the gateway's own count."""

    requests: int = 0
    prompt_tokens: int = 0
    completion_tokens: int = 0
    cached_tokens: int = 0
    estimated: int = 0

    def add(self, other: "Sums") -> None:
        """Add another."""
        self.requests += other.requests
        self.prompt_tokens += other.prompt_tokens
        self.completion_tokens += other.completion_tokens
        self.cached_tokens += other.cached_tokens
        self.estimated += other.estimated


class Row(Sums, gc=False, kw_only=True):
    """What is saved of a key."""

    tenant: str
    model: str
    outcome: str


class Day(msgspec.Struct):
    """A day's file. `seq`: audit lines up to this one are counted."""

    seq: int = 0
    rows: list[Row] = []


class Position(msgspec.Struct):
    """Audit lines up to this one are counted, or belong to no day."""

    seq: int = 0
