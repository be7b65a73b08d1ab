"""What is said to who has waited too long."""

import math
from typing import TYPE_CHECKING

from forebay.core.errors import TABLE, Code, Refusal

if TYPE_CHECKING:
    from forebay.gateway.fleet import Served


def too_late(served: "Served", now: float) -> tuple[Refusal, int]:
    """The answer, and after how many seconds to come back: while a replica starts, as long as that takes."""
    if served.ready:
        return Refusal(Code.QUEUE_TIMEOUT), served.waiting.retry_after_s(now)
    start_s = math.ceil(served.routes.start_s)
    if not start_s:
        return Refusal(Code.NO_REPLICA), served.waiting.retry_after_s(now)
    text = f"{TABLE[Code.NO_REPLICA].text} One that starts is ready after about {start_s} s."
    return Refusal(Code.NO_REPLICA, text), start_s
