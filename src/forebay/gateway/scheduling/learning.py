"""What complete responses teach about a model and its replicas: lengths, speeds, and the pace of decoding."""

from typing import TYPE_CHECKING, Final

from forebay.core.model import Task
from forebay.core.routing.meter import DECODE_TOKENS_MIN, LEAST_SHARE
from forebay.gateway.records.estimates import learn_answer
from forebay.gateway.requests.state import WHOLE

if TYPE_CHECKING:
    from forebay.gateway.link import Link
    from forebay.gateway.requests.relay import Relay

_CHAT: Final = Task.CHAT  # looked up once: access to enum members is slow


def learn(relay: "Relay", now: float, estimate: int) -> None:
    """Learn from the measured lengths and times; `estimate` is that of its prompt's tokens."""
    charge, link = relay.charge, relay.link
    prompt_tokens, output_tokens, cached_tokens = relay.usage
    if relay.plain and not prompt_tokens:
        prompt_tokens = estimate
    if not prompt_tokens:
        return
    relay.served.lengths.learn(relay.prompt_bytes, prompt_tokens, output_tokens)
    steps = output_tokens // relay.parallel  # the time per token is that of one choice
    learn_answer(relay, output_tokens, steps, now)
    if link is None or relay.resumes or relay.preempted:
        return
    if relay.mode == WHOLE:
        _compare(relay, link, steps, now)
    if charge is None:
        return
    if relay.served.routes.task is not _CHAT:  # the answer is complete once the prompt has been processed
        charge.first_token(now, link.load)
    charge.done(now, link.load, prompt_tokens, cached_tokens, steps)
    if charge.first_at is not None and steps >= DECODE_TOKENS_MIN and link.pace.wants(now):
        pace_s = (now - charge.first_at) / (steps - 1)
        link.pace.learn((charge.running + link.load) / 2, link.places, pace_s, now)


def _compare(relay: "Relay", link: "Link", steps: int, now: float) -> None:
    """Note the time of a whole answer, as that of a typical one, for the comparison with other replicas: a replica
    that gets long requests, or generates long answers, must not count as slow."""
    served, charge = relay.served, relay.charge
    lengths, tokens_per_s = served.lengths, served.pricing.prefill_tokens_per_s
    tokens = charge.ahead_tokens + charge.tokens if charge is not None else lengths.tokens(relay.prompt_bytes)
    usual_s = lengths.prompt_tokens / tokens_per_s + lengths.output_tokens * lengths.pace_s
    own_s = tokens / tokens_per_s + steps * lengths.pace_s
    seconds = (now - relay.since) * usual_s / max(own_s, LEAST_SHARE * usual_s)
    link.breaker.brown_out.note_whole(seconds, now)
