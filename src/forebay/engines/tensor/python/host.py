"""What the process of a Python model knows of itself. There is one model in it, as there is one interpreter."""

from dataclasses import dataclass, field

from forebay.engines.tensor.protocol import CallModel


@dataclass(slots=True)
class Host:
    """The model that this process runs."""

    name: str = ""
    folder: str = ""
    """Of the version."""
    call: CallModel | None = None
    """How other models are called; None except while requests may come."""


@dataclass(slots=True)
class _Current:
    host: Host = field(default_factory=Host)


current = _Current()
"""Models import a module and find their process in it: so this is the one place with state of its own."""
