"""Other systems' routing policies, written anew from what they publish, to measure ours against."""

from forebay.sim.rivals.table import RIVALS, Row
from forebay.sim.rivals.values import Report, Rival, Seen, State, Truth

__all__ = ["RIVALS", "Report", "Rival", "Row", "Seen", "State", "Truth"]
