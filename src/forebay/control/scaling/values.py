"""Requests and results of the scaling of models."""

from dataclasses import dataclass

from forebay.control.scaling.state import DecisionRecord, Setting
from forebay.core.scaling.settings import Scale


class ScaleRefused(Exception):  # noqa: N818 - an answer, not a mistake
    """A scaling request was rejected. `param` names what is wrong."""

    def __init__(self, text: str, param: str) -> None:
        super().__init__(text)
        self.text = text
        self.param = param


@dataclass(frozen=True, slots=True)
class ScalingRequest:
    """A request for the scaling of a model; all None: as in the cluster file."""

    model: str
    replicas: int | None = None
    """A fixed count, whatever the load."""
    min: int | None = None
    max: int | None = None
    why: str = ""


@dataclass(frozen=True, slots=True)
class LimitUse:
    """The use of a limit that all models share."""

    name: str
    """`gpus` or `replicas`."""
    used: float
    most: float


@dataclass(frozen=True, slots=True)
class ScalingStanding:
    """The scaling status of a model."""

    model: str
    scale: Scale | None
    """Including the bounds set by operators; None: it is not scaled."""
    setting: Setting
    replicas: int
    """The count that control works towards."""
    wanted: int
    """The count that was decided; differs from `replicas` in shadow mode only."""
    min: int | None
    """The current bounds."""
    max: int | None
    cold_start_s: float | None
    decisions: tuple[DecisionRecord, ...]
    """Decisions, newest last."""
    trouble: str
    """Why the store is unavailable; empty: it is available."""
