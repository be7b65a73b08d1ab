"""State of a Python model's process. It holds one model, since there is one interpreter."""

from dataclasses import dataclass, field

from forebay.engines.tensor.protocol import CallModel


@dataclass(slots=True)
class Host:
    """The model that this process runs."""

    name: str = ""
    folder: str = ""
    """Folder of the version."""
    call: CallModel | None = None
    """Calls other models; None except while requests are served."""
    administer: CallModel | None = None
    """Loads and unloads other models; None before the model is imported, and after its `finalize`."""


@dataclass(slots=True)
class _Current:
    host: Host = field(default_factory=Host)


current = _Current()
"""Models import a module and expect their process in it, so this is the only module with global state."""
