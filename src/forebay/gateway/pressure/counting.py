"""Load of each model, from the gateway's own counters: control polls it about once a second."""

from collections import Counter
from collections.abc import Iterator
from typing import TYPE_CHECKING, Final

from forebay.core.errors import Code
from forebay.core.model import Condition, Task
from forebay.core.pressure import Pressure, TrafficCounters
from forebay.gateway.scheduling.hedging import Hedge
from forebay.obs.metrics import Metrics

if TYPE_CHECKING:
    from forebay.gateway.fleet import Served
    from forebay.gateway.requests.relay import Relay
    from forebay.gateway.scheduling.scheduler import Scheduler

WANT: Final = frozenset(
    code.value
    for code in (
        Code.QUEUE_FULL,
        Code.QUEUE_TIMEOUT,
        Code.NO_REPLICA,
        Code.OVERLOADED,
        Code.DEADLINE_EXCEEDED,
    )
)
"""Errors that more replicas would have avoided."""
TROUBLES: Final = frozenset(Condition)


def pressure(scheduler: "Scheduler", metrics: Metrics) -> Pressure:
    """Totals since the gateway's start, and its current load."""
    ended, refused = Counter[str](), Counter[str]()
    for model, code in metrics.labels("requests_total"):
        several = int(metrics.counter("requests_total", model, code).value)
        ended[model] += several
        if code in WANT:
            refused[model] += several
    for model, trouble in metrics.labels("fallbacks_total"):  # another model has them now
        several = int(metrics.counter("fallbacks_total", model, trouble).value)
        ended[model] += several
        if trouble in TROUBLES:
            refused[model] += several
    now = scheduler.now()
    models = {
        name: _counters(served, ended[name], refused[name], now) for name, served in sorted(scheduler.served.items())
    }
    return Pressure(scheduler.observations.instance, now - scheduler.born, models)


def _counters(served: "Served", ended: int, refused: int, now: float) -> TrafficCounters:
    """`ended` requests are done here, `refused` of them for lack of replicas."""
    account, tokens = served.account, served.lengths.tokens
    here = prompt_tokens = waiting_tokens = 0
    stay_s = served.stay_s
    for relay in served.waiting.unordered():
        here += 1
        stay_s += now - relay.arrived
        waiting_tokens += tokens(relay.prompt_bytes)
    for relay in _running(served):
        here += 1
        stay_s += now - relay.arrived
        prompt_tokens += tokens(relay.prompt_bytes)
    live = [link for link in served.links if link.live]
    first = account.ttft if served.routes.task is Task.CHAT else account.duration
    return TrafficCounters(
        arrivals=ended + here,
        refused=refused,
        prompt_tokens=int(account.prompt_tokens.value) + prompt_tokens + waiting_tokens,
        completions=int(account.ok.value),
        output_tokens=int(account.completion_tokens.value),
        stay_s=stay_s,
        ttft=tuple(first.counts),
        tpot=tuple(account.tpot.counts),
        waiting=len(served.waiting),
        waiting_tokens=waiting_tokens,
        queued_tokens=sum(link.meter.queue_tokens for link in served.links),
        predicted_ttft_s=served.pricing.ttft_s(live, served.lengths, len(served.waiting), waiting_tokens),
        predicted_tpot_s=served.pricing.tpot_s(live),
    )


def _running(served: "Served") -> Iterator["Relay"]:
    """Requests with an attempt in flight, each once."""
    for link in (*served.links, *served.leaving):
        for relay in link.attempts:
            if not isinstance(relay, Hedge):
                yield relay
