"""A model with two revisions: which arm a request belongs to, where else it may go, and what it has shown.

Availability comes before the split. Where a request goes, by the canary's share of the traffic:

- A request of the stable arm waits for stable, even while the canary is idle: the share is the limit of trust in the
  canary. It may go anywhere only if no live stable replica is left that it has not tried, or all have open breakers.
- A request of the canary arm goes to stable at once if the canary has no room, no live replica, or open breakers.
- A request whose attempt failed goes to stable, and anywhere if stable has no room.
- At a share of 0 the canary gets the requests that name its revision. A live canary, although not trusted yet, is
  still better than an error: it also gets requests for which no live stable replica is left, and nothing else.
- At a share of 1 requests wait for the canary, unless none of its replicas is live, or all have open breakers.
- Sequences of tensor models have their state in a replica. They stay with stable as long as it has a live one.
"""

from typing import TYPE_CHECKING, Final

from forebay.core.deploy.answers import degenerate, refuses
from forebay.core.deploy.samples import Sample
from forebay.core.errors import OK
from forebay.core.model import Split, Sticky, Task
from forebay.core.resilience import Outcome
from forebay.core.rollout.sides import side_of
from forebay.core.rollout.values import Arm, stratum_of
from forebay.core.routing import Route, Shed, Wait, Why
from forebay.gateway.asking import session_of
from forebay.gateway.dispatch.dispatching import of_other_revisions
from forebay.gateway.dispatch.endpoints import ENDPOINTS
from forebay.gateway.requests.state import WHOLE
from forebay.gateway.rollout.mirroring import EMBEDDINGS, Mirror, answer_in, begin_mirror
from forebay.gateway.scheduling.choosing import choose_replica
from forebay.obs.clock import wall_s
from forebay.wire.apis import texts
from forebay.wire.apis.vectors import Vectors

if TYPE_CHECKING:
    from forebay.gateway.link import Link
    from forebay.gateway.requests.relay import Relay
    from forebay.gateway.scheduling.scheduler import Scheduler

STABLE: Final = Arm.STABLE  # looked up once: access to enum members is slow
CANARY: Final = Arm.CANARY
NOTES: Final = {STABLE: "; stable", CANARY: "; canary"}
"""Suffix of a route's reason if the arm decided where the request went."""
TICK_S: Final = 0.001
"""Resolution of the loop's clock; no duration is zero."""
_CHAT: Final = Task.CHAT


class Side:
    """The arm of one request in one rollout, from its first choice to its end."""

    __slots__ = ("arm", "bound", "meant", "mirror", "note", "rollout", "since", "stays", "tells", "went")

    def __init__(self, rollout: str, arm: Arm, *, stays: bool, tells: bool) -> None:
        self.rollout = rollout
        self.arm = arm
        self.stays = stays
        """It stays with this arm whatever the share becomes."""
        self.tells = tells
        """Whether its outcome says something about the revision."""
        self.meant = arm
        """The arm that the last choice aimed at: with a share of 0 or 1 all requests go to one arm."""
        self.bound = ""
        """The revision that it waits for; empty: any."""
        self.went: Arm | None = None
        """The arm of its first attempt, if that went where it was meant to go and is not reported yet."""
        self.since = 0.0
        """When that attempt began, on the loop's clock."""
        self.note = ""
        self.mirror: Mirror | None = None


def choose_by_arm(scheduler: "Scheduler", relay: "Relay", split: Split) -> Route | Wait | Shed:
    """Choose a replica for a request that names no revision."""
    side, share = _side_in(relay, split), split.share
    failed = relay.retries > 0 or relay.resumes > 0
    everything = share >= 1.0 and not side.stays
    if not failed and (everything or (side.arm is CANARY and share > 0.0)):
        side.meant, side.bound = CANARY, split.canary if everything else ""
        choice = _within(scheduler, relay, split.canary)
        if isinstance(choice, Route) or (everything and choice is not None):
            return choice
        if everything:
            return choose_replica(scheduler, relay, relay.tried)
    else:
        side.meant = STABLE
    side.bound = split.stable
    choice = _within(scheduler, relay, split.stable, required=share <= 0.0 or side.stays)
    if choice is not None and (isinstance(choice, Route) or share <= 0.0 or not failed):
        return choice
    side.bound = ""
    return choose_replica(scheduler, relay, relay.tried)


def kind_of(relay: "Relay") -> tuple[Arm, bool] | None:
    """Key of the queued requests that may go to the same replicas; None: the request has no arm."""
    split = relay.served.split
    if split is None or relay.revision:
        return None
    return _side_in(relay, split).arm, relay.retries > 0 or relay.resumes > 0


def bound_to(relay: "Relay") -> str:
    """The revision that a request needs a slot of; empty: any."""
    return relay.revision or (relay.side.bound if relay.side is not None else "")


def sent(scheduler: "Scheduler", relay: "Relay", link: "Link", split: Split) -> None:
    """A request is being sent to a replica of a model with two revisions."""
    if link.mirrors and link.load + len(link.mirrors) > link.places:
        next(reversed(link.mirrors)).cancel()
    side = relay.side
    if side is None or side.rollout != split.rollout:  # it named a revision
        return
    its_own = link.revision == (split.canary if side.meant is CANARY else split.stable)
    side.note = NOTES[side.meant] if its_own else ""
    side.went = side.meant if its_own and not relay.attempts and side.tells else None
    side.since = relay.since
    if side.went is STABLE and split.mirrored > 0.0:
        side.mirror = begin_mirror(scheduler, relay, split)


def report(scheduler: "Scheduler", relay: "Relay", code: str, outcome: Outcome, now: float) -> None:
    """Report the first attempt when it ends: a later one may hide that it failed."""
    side, split = relay.side, relay.served.split
    assert side is not None
    arm, mirror = side.went, side.mirror
    side.went = side.mirror = None
    if arm is None or split is None or split.rollout != side.rollout:
        return
    whole = relay.mode == WHOLE
    if outcome is Outcome.NEUTRAL and not (whole and 400 <= relay.status < 500):
        return
    latency_s, at = max(TICK_S, now - side.since), wall_s()
    early = at - latency_s < split.counts_from
    stratum = stratum_of(int(relay.served.lengths.tokens(relay.prompt_bytes)))
    if code != OK:
        failed = Sample(split.rollout, arm, at, code, stratum, latency_s=latency_s, early=early)
        scheduler.observations.note(failed)
        return
    ttft_s = tpot_s = -1.0
    tokens = relay.usage[1] or relay.events[1]
    if relay.first_at:
        ttft_s = max(TICK_S, relay.first_at - side.since)
        if tokens > 1:
            tpot_s = max(TICK_S, now - relay.first_at) / (tokens - 1)
    text = _response_text(relay) if relay.served.routes.task is _CHAT else None
    sample = Sample(
        split.rollout, arm, at, code, stratum, ttft_s, tpot_s, latency_s, tokens,
        None if text is None else refuses(text), None if text is None else degenerate(text), early,
    )  # fmt: skip
    answer: str | Vectors | None = text
    if mirror is not None and whole and relay.path == EMBEDDINGS:
        answer = answer_in(EMBEDDINGS, relay.body)
    pair = mirror.stable_said(answer) if mirror is not None and answer is not None else None
    scheduler.observations.note(sample, pair)


def _side_in(relay: "Relay", split: Split) -> Side:
    """The arm of a request in this rollout; it gets one if it has none, as one that was queued before has."""
    side = relay.side
    if side is None or side.rollout != split.rollout:
        side = relay.side = _side_for(relay, split)
    return side


def _side_for(relay: "Relay", split: Split) -> Side:
    if relay.once:
        return Side(split.rollout, STABLE, stays=True, tells=False)
    endpoint = ENDPOINTS.get(relay.path.encode())
    works = endpoint.runs if endpoint is not None else relay.request.startswith(b"POST ")
    by_caller = split.sticky is Sticky.CALLER or (relay.routing is not None and relay.routing.stays)
    key = _caller(relay) if by_caller else relay.request_id.decode("latin-1")
    return Side(split.rollout, side_of(key, split.rollout, split.share), stays=False, tells=works)


def _caller(relay: "Relay") -> str:
    """The caller: a session, a user of an API key or the key itself, or an address."""
    session = relay.session or session_of(relay.exchange, relay.served.routes)
    if session:
        return f"session {session.decode('latin-1')}"
    key = relay.admitted.key_id if relay.admitted is not None else ""
    user = "" if relay.plain else texts.end_user(relay.request.partition(b"\r\n\r\n")[2])
    return f"key {key} user {user}" if key or user else f"address {relay.client}"


def _within(
    scheduler: "Scheduler", relay: "Relay", revision: str, *, required: bool = False
) -> Route | Wait | Shed | None:
    """A choice among the live replicas of a revision; None: none is left, or only some with open breakers."""
    served, tried = relay.served, relay.tried
    if not any(x.live and x.revision == revision and (x.id, x.generation) not in tried for x in served.links):
        return None
    others = of_other_revisions(served.links, revision)
    choice = choose_replica(scheduler, relay, (*tried, *others), admissible_only=not required)
    if required or isinstance(choice, Route):
        return choice
    return choice if isinstance(choice, Wait) and choice.why is not Why.NONE_READY else None


def _response_text(relay: "Relay") -> str | None:
    """The text of a complete response; None if it has none, or cannot be parsed."""
    transcript = relay.transcript
    if transcript is not None:
        what = transcript.state()
        return what.text.decode() if what is not None else None
    return texts.response_text(b"".join(relay.body)) if relay.mode == WHOLE else None
