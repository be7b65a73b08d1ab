"""Checks where requests of a model with two revisions are sent."""

from collections.abc import Callable, Sequence

from forebay.core.model import Split, Sticky
from forebay.core.rollout.values import Arm
from forebay.gateway.asking import SESSION
from forebay.gateway.link import Link
from forebay.gateway.requests.relay import Relay

Expect = Callable[[object, str, str], None]


class Sides:
    """The arms assigned to callers by all gateways."""

    def __init__(self) -> None:
        self._of: dict[tuple[str, float, bytes], Arm] = {}

    def check(
        self, relay: Relay, link: Link, split: Split, *, sound: Sequence[Link], share: float | None, expect: Expect
    ) -> None:
        """A request is sent to a replica. `sound`: live replicas that could take it; `share`: the canary's when it
        arrived."""
        side, name = relay.side, f"{relay.request_id.decode()} to {link.id}.{link.generation} of {link.revision}"
        if relay.revision or side is None or side.rollout != split.rollout:
            return
        failed = relay.retries > 0 or relay.resumes > 0
        if split.sticky is Sticky.CALLER and split.share == share:
            caller = split.rollout, split.share, relay.exchange.header(SESSION) or b""
            arm = self._of.setdefault(caller, side.arm)
            expect(arm is side.arm, "a caller stays in one arm", f"{name}: {side.arm}")
        if side.stays or failed:
            return
        at_canary = link.revision == split.canary
        stable = [each.id for each in sound if each.revision == split.stable]
        canary = [each.id for each in sound if each.revision == split.canary]
        if split.share >= 1 or (split.share > 0 and side.arm is Arm.CANARY):
            expect(at_canary or not canary, "a canary gets its share", f"{name}: {canary} are free")
        else:
            expect(not at_canary or not stable, "a canary gets no more than its share", f"{name}: {stable} are free")
