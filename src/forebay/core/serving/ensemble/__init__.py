"""Ensembles: validation, load order, and what each request runs next."""

from forebay.core.serving.ensemble.check import LATEST, Checked, Lookup, abreast, check, in_order, lacks, load_order
from forebay.core.serving.ensemble.flow import Dag, Flow, Gates, Progress, Start, carried_shape

__all__ = [
    "LATEST",
    "Checked",
    "Dag",
    "Flow",
    "Gates",
    "Lookup",
    "Progress",
    "Start",
    "abreast",
    "carried_shape",
    "check",
    "in_order",
    "lacks",
    "load_order",
]
