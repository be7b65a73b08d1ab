"""Admission: which request is queued, which goes next, which is rejected, and which is preempted."""

from forebay.core.admission.drain import RETRY_AFTER_S_MAX, WINDOW_S, DrainRate
from forebay.core.admission.pace import PaceModel
from forebay.core.admission.request_queue import AGE_S, Band, Refused, RequestQueue, RunningTicket, Ticket, preempt
from forebay.core.admission.sharing import LATELY_S, batch_max, batch_room, crowded

__all__ = [
    "AGE_S",
    "LATELY_S",
    "RETRY_AFTER_S_MAX",
    "WINDOW_S",
    "Band",
    "DrainRate",
    "PaceModel",
    "Refused",
    "RequestQueue",
    "RunningTicket",
    "Ticket",
    "batch_max",
    "batch_room",
    "crowded",
    "preempt",
]
