"""What complete responses teach about a model and its replicas: lengths, speeds, and the pace of decoding."""

from typing import TYPE_CHECKING, Final

from forebay.core.model import Task
from forebay.core.routing.meter import DECODE_TOKENS_MIN
from forebay.gateway.records.estimates import learn_answer

if TYPE_CHECKING:
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
    learn_answer(relay, output_tokens, now)
    if charge is None or link is None or relay.resumes or relay.preempted:
        return
    if relay.served.routes.task is not _CHAT:  # the answer is complete once the prompt has been processed
        charge.first_token(now, link.load)
    charge.done(now, link.load, prompt_tokens, cached_tokens, output_tokens)
    if charge.first_at is not None and output_tokens >= DECODE_TOKENS_MIN and link.pace.wants(now):
        pace_s = (now - charge.first_at) / (output_tokens - 1)
        link.pace.learn((charge.running + link.load) / 2, link.places, pace_s, now)
