"""Admission: which request is queued, which goes next, which is rejected, and which is preempted."""

from forebay.core.admission.drain import RETRY_AFTER_S_MAX, WINDOW_S, DrainRate
from forebay.core.admission.sharing import LATELY_S, batch_max, batch_room, crowded
from forebay.core.admission.toll import Toll
from forebay.core.admission.waiting import AGE_S, Band, Refused, RunningTicket, Ticket, WaitingRoom, preempt

__all__ = [
    "AGE_S",
    "LATELY_S",
    "RETRY_AFTER_S_MAX",
    "WINDOW_S",
    "Band",
    "DrainRate",
    "Refused",
    "RunningTicket",
    "Ticket",
    "Toll",
    "WaitingRoom",
    "batch_max",
    "batch_room",
    "crowded",
    "preempt",
]
