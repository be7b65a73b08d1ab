"""The rivals, as shipped and with modified settings."""

from collections.abc import Callable
from typing import Final, NamedTuple

from forebay.sim.rivals.counting import AnyReplica, BoundedHash, LeastRequests, PowerOfTwo, RoundRobin
from forebay.sim.rivals.dynamo import KvRouter, Weights
from forebay.sim.rivals.gie import Scorers, TokenLoad
from forebay.sim.rivals.lmetric import LMetric
from forebay.sim.rivals.oracle import Oracle
from forebay.sim.rivals.production_stack import LoadAware, PrefixAware
from forebay.sim.rivals.smg import CHARS, CacheAware, Switch
from forebay.sim.rivals.values import Rival


class Row(NamedTuple):
    """A rival. Every gateway creates its own instance."""

    make: Callable[[], Rival]
    source: str
    """Source of its rule and constants."""
    changed: str = ""
    """Changes from what is shipped, and why; empty: none."""
    events: bool = False
    """Whether it needs engines that report their caches."""


_TEXTBOOK: Final = "textbook"
_CHWBL: Final = "Mirrokni, Thorup and Zadimoghaddam, Consistent Hashing with Bounded Loads, arXiv 1608.01350"
_SMG: Final = "github.com/lightseekorg/smg, model_gateway/src/policies, August 2026"
_STACK: Final = "github.com/vllm-project/production-stack, src/vllm_router, August 2026"
_LOADAWARE: Final = "github.com/vllm-project/production-stack, pull request 1035"
_GIE: Final = "github.com/llm-d/llm-d-router, pkg/epp, August 2026"
_LLM_D: Final = "github.com/llm-d/llm-d, pull request 2071, and llm-d-router"
_DYNAMO: Final = "github.com/ai-dynamo/dynamo, lib/kv-router/src/scheduling, 2026"
_LMETRIC: Final = "Zhang et al., Multiplication May Be All You Need for LLM Request Scheduling, arXiv 2603.15202"
_OWN: Final = "our own yardstick"

RIVALS: Final[dict[str, Row]] = {
    "plain_random": Row(AnyReplica, _TEXTBOOK),
    "plain_round_robin": Row(RoundRobin, _TEXTBOOK),
    "plain_least_requests": Row(LeastRequests, _TEXTBOOK),
    "plain_p2c": Row(PowerOfTwo, "Mitzenmacher, The Power of Two Choices in Randomized Load Balancing, 2001"),
    "plain_hash": Row(lambda: BoundedHash(1), _CHWBL),
    "plain_hash.tenant": Row(lambda: BoundedHash(0), _CHWBL, "key: the tenant, as sessions are pinned"),
    "plain_hash.2": Row(lambda: BoundedHash(2), _CHWBL, "key: two blocks, where all prompts share the first"),
    "plain_hash.4": Row(lambda: BoundedHash(4), _CHWBL, "key: four blocks, as far as long system prompts go"),
    "smg_prefix_hash": Row(lambda: BoundedHash(1, to_least=True), _SMG),
    "smg_prefix_hash.2": Row(lambda: BoundedHash(2, to_least=True), _SMG, "key: two blocks instead of 256 tokens"),
    "smg_cache_aware": Row(lambda: CacheAware(Switch()), _SMG),
    "smg_cache_aware.library": Row(
        lambda: CacheAware(Switch(0.5, 32, 1.1, eviction_s=30.0, tree_tokens=10_000 // CHARS)),
        _SMG,
        "its library's defaults: thresholds 0.5, 32, 1.1 and a tree of 10,000 characters, evicted every 30 s",
    ),
    "smg_cache_aware.tight": Row(
        lambda: CacheAware(Switch(0.5, 32, 1.1)), _SMG, "the library's thresholds, the command line's large tree"
    ),
    "smg_cache_aware.eager": Row(
        lambda: CacheAware(Switch(0.1, 16, 1.1)), _SMG, "affinity for shorter matches, given up at smaller loads"
    ),
    "smg_cache_aware.kv": Row(
        lambda: CacheAware(Switch(kv_spread=0.5, kv_overload=0.9)), _SMG, "the KV triggers on, at the values it names"
    ),
    "smg_cache_aware.events": Row(
        lambda: CacheAware(Switch(events=True)), _SMG, "engine events instead of its own tree", events=True
    ),
    "smg_cache_aware.events_tight": Row(
        lambda: CacheAware(Switch(0.5, 32, 1.1, events=True)), _SMG, "the same, library thresholds", events=True
    ),
    "production_stack": Row(PrefixAware, _STACK),
    "production_stack.2048": Row(
        lambda: PrefixAware(match_tokens_min=2048), _STACK, "matches below 2,048 tokens go by the rate of requests"
    ),
    "production_stack.loadaware": Row(LoadAware, _LOADAWARE, "its later router with a load term", events=True),
    "production_stack.loadaware_half": Row(
        lambda: LoadAware(beta=0.5), _LOADAWARE, "beta 0.5 instead of 1: more affinity", events=True
    ),
    "gie": Row(Scorers, _GIE),
    "gie.exact_size": Row(lambda: Scorers(remembers=1.0), _GIE, "its index remembers what engines hold, not 4x"),
    "gie.prefix": Row(lambda: Scorers(1.0, 1.0, 3.0), _GIE, "1:1:3 instead of 2:2:3: more affinity"),
    "gie.load": Row(lambda: Scorers(3.0, 2.0, 2.0), _GIE, "3:2:2 instead of 2:2:3: more balance"),
    "gie.events": Row(
        lambda: Scorers(1.0, 1.0, 2.0, events=True), _GIE, "its setting for engine events: 1:1:2", events=True
    ),
    "gie.events_223": Row(lambda: Scorers(events=True), _GIE, "engine events with 2:2:3", events=True),
    "llm_d": Row(TokenLoad, _LLM_D, events=True),
    "llm_d.2s": Row(lambda: TokenLoad(penalty_s=2.0), _LLM_D, "holders may be later by 2 s, not 18", events=True),
    "dynamo": Row(lambda: KvRouter(Weights()), _DYNAMO, events=True),
    "dynamo.half": Row(lambda: KvRouter(Weights(0.5)), _DYNAMO, "overlap weight 0.5: steadier tokens", events=True),
    "dynamo.double": Row(
        lambda: KvRouter(Weights(2.0)), _DYNAMO, "overlap weight 2: sooner first tokens", events=True
    ),
    "dynamo.quadruple": Row(lambda: KvRouter(Weights(4.0)), _DYNAMO, "overlap weight 4", events=True),
    "dynamo.decay": Row(
        lambda: KvRouter(Weights(decay=1.0)), _DYNAMO, "credit fades with the queue, against hot spots", events=True
    ),
    "dynamo.softmax": Row(
        lambda: KvRouter(Weights(temperature=0.1)), _DYNAMO, "temperature 0.1, against herds", events=True
    ),
    "dynamo.predicted": Row(
        lambda: KvRouter(Weights(predicted_s=5.0)), _DYNAMO, "what was sent is expected for 5 s", events=True
    ),
    "dynamo.approximate": Row(
        lambda: KvRouter(Weights(events=False, predicted_s=120.0)), _DYNAMO, "its mode without events: 120 s"
    ),
    "lmetric": Row(LMetric, _LMETRIC, events=True),
    "lmetric.reported": Row(
        lambda: LMetric(reported=True), _LMETRIC, "by what replicas report, as several routers must", events=True
    ),
    "oracle": Row(Oracle, _OWN),
    "oracle.end": Row(lambda: Oracle(to_the_end=True), _OWN, "the last token instead of the first"),
    "oracle.price_1": Row(lambda: Oracle(price=1.0), _OWN, "new work counts twice"),
    "oracle.price_4": Row(lambda: Oracle(price=4.0), _OWN, "new work counts five times"),
}
"""By name in simulations; the part after the dot names the change."""
