"""A simulated engine: step times of known hardware, and a scheduler on top of them."""

from forebay.sim.engine.hardware import Hardware, Start, hardware, rows, start_s
from forebay.sim.engine.replica import Replica
from forebay.sim.engine.step import StepTime
from forebay.sim.engine.values import EngineEvent, Job, JobTooLarge, Kind

__all__ = [
    "EngineEvent",
    "Hardware",
    "Job",
    "JobTooLarge",
    "Kind",
    "Replica",
    "Start",
    "StepTime",
    "hardware",
    "rows",
    "start_s",
]
