"""Other systems' routing policies, reimplemented from their published code, for comparison."""

from forebay.sim.rivals.table import RIVALS, Row
from forebay.sim.rivals.values import Report, Rival, RoutedRequest, State, Truth

__all__ = ["RIVALS", "Report", "Rival", "RoutedRequest", "Row", "State", "Truth"]
