"""Requests for a model that is loaded again because of them."""

from collections.abc import Callable

from forebay.core.serving.errors import Kind, Refused
from forebay.modelserver.models.running.call import Call, Runner
from forebay.modelserver.models.running.counting import Counts, Reason


class Parking:
    """Stands for the scheduler of a version that sleeps."""

    def __init__(self, counts: Counts, awaken: Callable[[], None]) -> None:
        self._counts = counts
        self._awaken = awaken
        self._waking = False
        self._calls: dict[Call, None] = {}

    @property
    def waiting(self) -> int:
        """Requests that wait for the model."""
        return len(self._calls)

    def submit(self, call: Call) -> None:
        """Keep a request, and wake the model."""
        self._calls[call] = None
        self.awaken()

    def awaken(self) -> None:
        """Wake the model, unless that is under way."""
        if not self._waking:
            self._waking = True
            self._awaken()

    def cancel(self, call: Call) -> None:
        """Nobody waits for that request."""
        if self._calls.pop(call, call) is None:
            self._counts.refuse(call, Refused(Kind.CANCELLED, ""), Reason.CANCELED)

    def set_instances(self, instances: int) -> None:
        """There are none."""

    def wake(self) -> None:
        """Nothing can start here."""

    def close(self, refused: Refused) -> None:
        """All that wait end with this error; the next one wakes the model again."""
        self._waking = False
        calls, self._calls = self._calls, {}
        for call in calls:
            self._counts.refuse(call, refused, Reason.OTHER)

    def move(self, runner: Runner) -> None:
        """The model is there: its scheduler takes over."""
        calls, self._calls = self._calls, {}
        for call in calls:
            call.runner = runner
            try:
                runner.submit(call)
            except Refused as refused:
                self._counts.refuse(call, refused, Reason.OTHER)
