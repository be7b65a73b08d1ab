"""What people say about the scaling of a model, and what they are told."""

from dataclasses import dataclass

from forebay.control.scaling.kept import Setting, Told
from forebay.core.scaling.settings import Scale


class ScaleRefused(Exception):  # noqa: N818 - an answer, not a mistake
    """What was asked for cannot be done. `param` names what is wrong."""

    def __init__(self, text: str, param: str) -> None:
        super().__init__(text)
        self.text = text
        self.param = param


@dataclass(frozen=True, slots=True)
class Wish:
    """What somebody wants from now on; all None: what the cluster file says."""

    model: str
    replicas: int | None = None
    """So many, whatever the load."""
    min: int | None = None
    max: int | None = None
    why: str = ""


@dataclass(frozen=True, slots=True)
class LimitUse:
    """What all models together may have of something, and what was given out of it."""

    name: str
    """`gpus` or `replicas`."""
    used: float
    most: float


@dataclass(frozen=True, slots=True)
class Standing:
    """Where a model stands."""

    model: str
    scale: Scale | None
    """With the bounds that people have set; None: it is not scaled."""
    setting: Setting
    replicas: int
    """That control works towards."""
    wanted: int
    """That were decided; another number than `replicas` in shadow mode only."""
    min: int | None
    """The bounds that hold now."""
    max: int | None
    cold_start_s: float | None
    told: tuple[Told, ...]
    """Decisions, the newest last."""
    trouble: str
    """Why the store cannot be used; empty: it can."""
