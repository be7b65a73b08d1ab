"""In-memory state of an active rollout besides what is stored: harm, and the current verdict."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from forebay.core.deploy.counting import Counted
from forebay.core.deploy.crashes import harm_of
from forebay.core.deploy.evidence import incidents
from forebay.core.deploy.rollout import ModelObservation
from forebay.core.deploy.samples import Sample
from forebay.core.lifecycle import Event
from forebay.core.model import LoadReport
from forebay.core.reconcile import Move, State, UnitKey
from forebay.core.rollout import GUARDS, Harm, Incident, Tripped, Verdict, tripped

INCIDENTS_MAX = 1000
ANSWERS_MAX = 10_000
"""How many ends of responses are kept; if there are more in a guard's window, the latest count."""
ANSWERS_S = max(guard.window_s for guard in GUARDS if guard.share)
WORDS_CHARS_MAX = 200
ENDS = (Event.DIED, Event.HELD_BACK, Event.LEAVES)


@dataclass(frozen=True, slots=True)
class Looked:
    """The result of a round of the reconcile loop."""

    before: State
    after: State
    moves: Sequence[Move]
    reports: Mapping[UnitKey, LoadReport]


class Watch:
    """The state of one rollout."""

    def __init__(self, kept: Counted, verdict: Verdict, now: float) -> None:
        self.seen: ModelObservation | None = None
        """What the last round observed."""
        self.short_at = now
        """When gateways were last told less than the decided share, on the loop's clock: whether that could be stored
        or not. What another process told them is not known."""
        self.verdict = verdict
        self.withdrawn = ""
        """Why the canary gets no more traffic, whether stored yet or not; empty: no harm was found."""
        self._kept = kept
        self._kept_at = 0.0
        self._incidents: list[Incident] = []
        self._answers: list[float] = []
        self._words = ""
        self._engines: dict[UnitKey, int] = {}

    def store(self, counted: Counted, now: float) -> None:
        """Record that this evidence was stored, at a time of the loop's clock."""
        self._kept, self._kept_at = counted, now

    def is_due(self, counted: Counted, now: float, every_s: float) -> bool:
        """Whether evidence should be stored again."""
        return counted is not self._kept and now >= self._kept_at + every_s

    def hear(self, samples: Sequence[Sample]) -> None:
        """Process samples from gateways."""
        harm, answers = incidents(samples)
        self._incidents += harm
        self._answers += answers

    def look(self, slots: Iterable[str], seen: Looked, wall: float) -> None:
        """Process the canary's slots: one whose restart count has grown has failed."""
        counts = {s.id: s.restarts for s in seen.before.slots}
        failed = {s.id for s in seen.after.slots if s.restarts > counts.get(s.id, 0)}
        for id in sorted(failed.intersection(slots)):
            ends = [move for move in seen.moves if move.slot == id and move.event in ENDS]
            words = "; ".join(_ending(move) for move in ends[:1]) or id
            self._note(words, harm_of("\n".join(f"{move.why}\n{move.last_words}" for move in ends)), wall)

    def listen(self, slots: Iterable[str], reports: Mapping[UnitKey, LoadReport], wall: float) -> None:
        """Process how often the canary's engines have died within their workers."""
        wanted, engines = set(slots), {}
        for key, report in sorted(reports.items()):
            if key[0] in wanted:
                engines[key] = report.engine_restarts
                if report.engine_restarts > self._engines.get(key, report.engine_restarts):
                    self._note(f"{key[0]}: its engine has died", Harm.CRASH, wall)
        self._engines = engines

    def tripped(self, now: float) -> Tripped | None:
        """The guard that has been tripped, if any."""
        self._answers = [at for at in self._answers[-ANSWERS_MAX:] if at > now - ANSWERS_S]
        oldest = self._answers[0] if len(self._answers) == ANSWERS_MAX else now - ANSWERS_S
        self._incidents = [
            each
            for each in self._incidents[-INCIDENTS_MAX:]
            if each.harm is not Harm.SERVER_ERROR or each.at_s >= oldest
        ]
        found = tripped(self._incidents, self._answers, now)
        if found is None or found.guard.harm is Harm.SERVER_ERROR or not self._words:
            return found
        return found._replace(reason=f"{found.reason}: {self._words}")

    def _note(self, words: str, harm: Harm, wall: float) -> None:
        self._words = words[:WORDS_CHARS_MAX]
        self._incidents.append(Incident(harm, wall))


def _ending(move: Move) -> str:
    """How a unit ended: the reason, and the last line of its output."""
    lines = move.last_words.strip().splitlines()
    return f"{move.slot}: {move.why}{f' ({lines[-1]})' if lines else ''}"
