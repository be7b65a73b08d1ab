"""Congestion-priced routing: each term of the cost, and the behaviour of fleets routed by it."""

import heapq
import math
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from random import Random
from statistics import mean
from typing import Any

import pytest
from tests.core.routing.views import choose

from forebay.core.model import Policy, ReplicaState
from forebay.core.routing import (
    BATCH,
    Charge,
    Meter,
    PrefixIndex,
    Pricing,
    Route,
    RoutingRequest,
    Score,
    Wait,
    Why,
    cpr,
)
from forebay.core.routing.pricing import RHO_MAX

BLOCK_TOKENS = 128
SPEED = 8000.0
STEP_S, STEP_SLOPE_S = 0.008, 0.0004


@dataclass(eq=False)
class Engine:
    """A replica that does one prompt after the other and keeps its blocks; all answers under way share its pace."""

    id: str
    meter: Meter
    speed: float = SPEED
    cache_blocks: int = 10**6
    state: ReplicaState = ReplicaState.READY
    load: int = 0
    room: int = 1000
    last_used: int = 0
    generation: int = 1
    free_at: float = 0.0
    work: int = 0
    hits: int = 0
    ttfts: list[float] = field(default_factory=list)
    held: OrderedDict[int, None] = field(default_factory=OrderedDict)

    def take(self, blocks: Sequence[int], tokens: int, now: float) -> int:
        """Put a prompt at the end of the line. Returns how many tokens of it are cached."""
        depth = next((n for n, block in enumerate(blocks) if block not in self.held), len(blocks))
        for block in reversed(blocks):
            self.held.pop(block, None)
            self.held[block] = None
        while len(self.held) > self.cache_blocks:
            self.held.popitem(last=False)
        cached = min(depth * BLOCK_TOKENS, tokens - 1)
        self.work += tokens - cached
        self.hits += cached
        self.free_at = max(self.free_at, now) + (tokens - cached) / self.speed
        return cached


@dataclass(frozen=True)
class Prompt:
    at: float
    blocks: tuple[int, ...]
    tail_tokens: int
    output_tokens: int = 64

    @property
    def tokens(self) -> int:
        return len(self.blocks) * BLOCK_TOKENS + self.tail_tokens


class Fleet:
    """One gateway and its replicas in virtual time, load reports every quarter of a second."""

    def __init__(self, policy: Policy, speeds: Iterable[float], cache_blocks: int = 10**6, room: int = 1000) -> None:
        self.policy = policy
        self.pricing = Pricing(PrefixIndex())
        self.engines = [
            Engine(
                f"chat-{n}", Meter(f"chat-{n}", self.pricing.index.join(cache_blocks)), speed, cache_blocks, room=room
            )
            for n, speed in enumerate(speeds)
        ]
        self.now = 0.0
        self.placed: list[str] = []
        self.waiting: list[tuple[int, Prompt]] = []
        self.under_way = 0
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._count = 0

    def at(self, when: float, do: Callable[[], None]) -> None:
        self._count += 1
        heapq.heappush(self._events, (when, self._count, do))

    def run(self, prompts: Sequence[Prompt]) -> "Fleet":
        self.under_way = len(prompts)
        for seed, prompt in enumerate(prompts):
            self.at(prompt.at, lambda seed=seed, prompt=prompt: self._send(seed, prompt))
        self.at(0.0, self._report)
        while self._events:
            self.now, _, do = heapq.heappop(self._events)
            do()
        return self

    def remove(self, id: str) -> None:
        gone = next(engine for engine in self.engines if engine.id == id)
        self.engines.remove(gone)
        self.pricing.index.leave(gone.meter.mask)

    def _report(self) -> None:
        for engine in self.engines:
            engine.meter.report(round(max(0.0, engine.free_at - self.now) * engine.speed), 0.0, 1)
        self.pricing.refresh([engine.meter for engine in self.engines], self.now)
        if self.under_way:
            self.at(self.now + 0.25, self._report)

    def _send(self, seed: int, prompt: Prompt) -> None:
        ask = RoutingRequest(seed, prompt.tokens, float(prompt.output_tokens), prompt.blocks, BLOCK_TOKENS)
        choice = choose(self.policy, self.engines, (), Random(seed), request=ask, pricing=self.pricing)
        if not isinstance(choice, Route):
            assert isinstance(choice, Wait)
            self.waiting.append((seed, prompt))
            return
        engine = self.engines[choice.at]
        self.placed.append(engine.id)
        charge = self.pricing.sent(engine.meter, ask, choice.hit_tokens, True, self.now)
        engine.load += 1
        engine.last_used = len(self.placed)
        cached = engine.take(prompt.blocks, prompt.tokens, self.now)
        self.at(engine.free_at + 0.01, lambda: self._first(engine, charge, prompt, cached))

    def _first(self, engine: Engine, charge: Charge, prompt: Prompt, cached: int) -> None:
        engine.ttfts.append(self.now - prompt.at)
        charge.first_token(self.now, engine.load)
        decode_s = (prompt.output_tokens - 1) * (STEP_S + STEP_SLOPE_S * engine.load)
        self.at(self.now + decode_s, lambda: self._end(engine, charge, prompt, cached))

    def _end(self, engine: Engine, charge: Charge, prompt: Prompt, cached: int) -> None:
        charge.done(self.now, engine.load, prompt.tokens, cached, prompt.output_tokens)
        engine.load -= 1
        self.under_way -= 1
        if self.waiting:
            self._send(*self.waiting.pop(0))

    @property
    def ttft_s(self) -> float:
        return mean(s for engine in self.engines for s in engine.ttfts)

    @property
    def hit_share(self) -> float:
        hits, work = sum(e.hits for e in self.engines), sum(e.work for e in self.engines)
        return hits / (hits + work)


def chain(name: str, count: int) -> tuple[int, ...]:
    rng = Random(name)
    return tuple(rng.getrandbits(64) for _ in range(count))


def poisson(rng: Random, per_s: float, count: int) -> list[float]:
    now, times = 0.0, []
    for _ in range(count):
        now += rng.expovariate(per_s)
        times.append(now)
    return times


# --- the terms


def pool(*loads: int, **marks: Sequence[float]) -> Fleet:
    """A fleet with these loads, and its meters' attributes set by name."""
    fleet = Fleet(Policy.CPR, [SPEED] * len(loads))
    for n, (engine, load) in enumerate(zip(fleet.engines, loads, strict=True)):
        engine.load = load
        engine.meter.prefill_tokens_per_s = SPEED
        for name, values in marks.items():
            setattr(engine.meter, name, values[n])
    fleet.pricing.refresh([engine.meter for engine in fleet.engines], 0.0)
    return fleet


def decide(fleet: Fleet, ask: RoutingRequest) -> Route:
    choice = choose(Policy.CPR, fleet.engines, (), Random(0), request=ask, pricing=fleet.pricing)
    assert isinstance(choice, Route)
    return choice


def row(score: Score) -> tuple[float, ...]:
    """All that a score says, in the order in which they are added up."""
    terms = (score.queue_s, score.prefill_s, score.decode_s, score.price_s, score.kv_s)
    return (score.at, score.load, *terms, score.handicap, score.total_s, score.hit_tokens)


PREFIX = chain("prefix", 8)


def long(**more: Any) -> RoutingRequest:
    """A request whose whole prompt is the prefix."""
    return RoutingRequest(1, 8 * BLOCK_TOKENS, 100.0, PREFIX, BLOCK_TOKENS, **more)


LONG = long()


def test_the_cost_is_the_weighted_sum_of_its_terms() -> None:
    fleet = pool(
        3, 0, queue_tokens=[4000, 0], kv_share=[0.5, 0.0], handicap=[1.0, 2.0], decode_slope_s=[0.001, 0.002]
    )
    fleet.pricing.index.note(fleet.engines[0].meter.mask, PREFIX[:4], 0.0)
    first, second = decide(fleet, LONG).terms
    rho = 0.25 / 1.25  # a mean wait of 0.25 s, half of the replicas' capacity at one second
    price = 0.5 * rho / (1 - rho) / SPEED
    imposed = 512 * (price + 3 * 0.15 / SPEED)  # three run there, and pause while it is read
    assert row(first) == pytest.approx(
        (0, 3, 0.5, 0.064, 100 * 0.001 * 3, imposed, 0.15, 1.0, 0.5 + 0.064 + 0.15 * 0.3 + imposed + 0.15, 512)
    )
    assert row(second) == pytest.approx((1, 0, 0, 0.128, 0, 1024 * price, 0, 2.0, 2 * (0.128 + 1024 * price), 0))
    batch = decide(fleet, long(weights=BATCH)).terms
    assert batch[0].total_s == pytest.approx(0.1 * (0.5 + 0.064) + 0.015 * 0.3 + imposed + 512 / SPEED + 0.15)


def test_decode_slope_is_clamped_to_the_median_of_the_pool() -> None:
    fleet = pool(1, 1, 1, decode_slope_s=[0.001, 0.1, 0.0001])
    assert [score.decode_s for score in decide(fleet, LONG).terms] == pytest.approx([0.1, 0.2, 0.05])


@pytest.mark.parametrize(
    ("rho", "weights", "at"), [(0.0, LONG.weights, 1), (0.9, LONG.weights, 0), (0.0, BATCH, 0)], ids=str
)
def test_fastest_replica_wins_at_low_load_and_the_prefix_owner_near_saturation(
    rho: float, weights: tuple[float, float], at: int
) -> None:
    fleet = pool(0, 0, queue_tokens=[4000, 0])
    fleet.pricing.index.note(fleet.engines[0].meter.mask, PREFIX, 0.0)
    fleet.pricing.rho = rho
    assert decide(fleet, long(weights=weights)).at == at


def test_price_uses_the_mean_speed_and_queue_time_the_replicas_own() -> None:
    fleet = pool(0, 0, prefill_tokens_per_s=[8000.0, 2000.0], queue_tokens=[1000, 1000])
    quick, slow = decide(fleet, LONG).terms
    assert quick.price_s == slow.price_s
    assert (slow.queue_s, slow.prefill_s) == pytest.approx((4 * quick.queue_s, 4 * quick.prefill_s))


def test_price_of_new_work_is_bounded() -> None:
    pricing = Pricing(PrefixIndex())
    prices = [pricing.price(wait_s, SPEED) for wait_s in (0.0, 0.1, 1.0, 10.0, 1e3, 1e9)]
    assert prices == sorted(prices)
    assert prices[0] == 0.0
    assert prices[2] == pytest.approx(0.5 / SPEED)
    pricing.rho = 50.0
    assert prices[-1] == pricing.price(0.0, SPEED) == pytest.approx(0.5 * RHO_MAX / (1 - RHO_MAX) / SPEED)


@pytest.mark.parametrize(
    ("speeds", "expected"),
    [
        ([0.0, 0.0, 0.0], [2000, 2000, 2000]),
        ([0.0, 4000.0, 9000.0], [9000, 4000, 9000]),
        ([10.0, 4000.0, 9000.0], [500, 4000, 9000]),
    ],
)
def test_unknown_speed_is_the_usual_one_and_speeds_have_a_lower_bound(
    speeds: list[float], expected: list[float]
) -> None:
    terms = decide(pool(0, 0, 0, prefill_tokens_per_s=speeds), LONG).terms
    assert [LONG.tokens / score.prefill_s for score in terms] == pytest.approx(expected)


def test_untrusted_cache_hit_does_not_reduce_the_cost() -> None:
    fleet = pool(0, 0, trust=[0.0, 1.0])
    for engine in fleet.engines:
        fleet.pricing.index.note(engine.meter.mask, PREFIX, 0.0)
    doubted, believed = decide(fleet, LONG).terms
    assert doubted.hit_tokens == believed.hit_tokens == LONG.tokens
    assert doubted.prefill_s == LONG.tokens / SPEED
    assert believed.prefill_s == 1 / SPEED  # at least the last token is always computed


def test_request_without_prefix_blocks_goes_to_the_replica_with_least_work() -> None:
    fleet = pool(0, 0, 0, queue_tokens=[900, 300, 600])
    choice = decide(fleet, RoutingRequest(1, 1000))
    assert (choice.at, choice.why, choice.hit_tokens) == (1, Why.CHEAPEST, 0)


def test_missed_objective_changes_the_reason_but_not_the_choice() -> None:
    fleet = pool(0, 0, queue_tokens=[2000, 0], prefill_tokens_per_s=[8000.0, 1000.0])
    fleet.pricing.index.note(fleet.engines[0].meter.mask, PREFIX, 0.0)
    fleet.pricing.rho = 0.9
    kept, late = decide(fleet, long(ttft_budget_s=1.0)), decide(fleet, long(ttft_budget_s=0.2))
    assert (kept.at, kept.why) == (0, Why.CHEAPEST)
    assert (late.at, late.why) == (0, Why.LATE)


def test_ties_are_drawn_by_the_request_seed_in_favour_of_less_loaded_replicas() -> None:
    fleet = pool(0, 3, 40, decode_slope_s=[1e-9] * 3, queue_tokens=[10, 0, 4000])
    choices = [decide(fleet, RoutingRequest(seed, 10)) for seed in range(1000)]
    again = [decide(fleet, RoutingRequest(seed, 10)) for seed in range(1000)]
    assert [choice.at for choice in choices] == [choice.at for choice in again]
    drawn = Counter(choice.at for choice in choices)
    assert {choice.why for choice in choices} == {Why.DRAWN}
    assert drawn[0] == pytest.approx(800, abs=50)
    assert drawn[1] == pytest.approx(200, abs=50)


def test_unobserved_prefill_is_released_after_its_expected_time() -> None:
    fleet = pool(0, 0)
    meters = [engine.meter for engine in fleet.engines]
    for meter, streams in zip(meters, (False, True), strict=True):
        fleet.pricing.sent(meter, LONG, 512, streams, 0.0)
    assert [meter.queue_tokens for meter in meters] == [512, 512]
    fleet.pricing.refresh(meters, 512 / SPEED)
    assert [meter.queue_tokens for meter in meters] == [0, 512]


def test_utilisation_is_arriving_work_over_fleet_speed() -> None:
    fleet = pool(0, 0)
    meters = [engine.meter for engine in fleet.engines]
    for tick in range(1, 1501):  # 1000 tokens each 0.125 s: half of two replicas
        fleet.pricing.sent(meters[tick % 2], RoutingRequest(tick, 1000), 0, True, tick / 8)
    fleet.pricing.refresh(meters, 187.5)
    assert fleet.pricing.rho == pytest.approx(0.5, rel=0.02)
    fleet.pricing.gateways = 2
    fleet.pricing.refresh(meters, 187.5)
    assert fleet.pricing.rho == pytest.approx(1.0, rel=0.02)
    fleet.pricing.refresh(meters, 187.5 + 300)
    assert fleet.pricing.rho < 0.001
    fleet.pricing.refresh([], 500.0)
    assert fleet.pricing.rho == 0.0


# --- whole fleets


def test_slow_replicas_get_less_traffic_without_overload() -> None:
    rng = Random(1)
    prompts = [Prompt(at, chain(f"own {n}", rng.randrange(2, 30)), 20) for n, at in enumerate(poisson(rng, 12, 400))]
    speeds = [SPEED] * 4 + [SPEED / 4] * 4
    priced, counted = (Fleet(policy, speeds).run(prompts) for policy in (Policy.CPR, Policy.LEAST_REQUESTS))
    work = [engine.work for engine in priced.engines]
    assert min(work[:4]) > 2 * max(work[4:])
    assert min(work[4:]) > 0
    assert max(work[:4]) < 1.5 * min(work[:4])
    assert priced.ttft_s < 0.7 * counted.ttft_s
    assert max(mean(e.ttfts) for e in priced.engines[4:]) < 0.7 * max(mean(e.ttfts) for e in counted.engines[4:])


def shared(seed: int, per_s: float, count: int, prefixes: int) -> list[Prompt]:
    """Prompts that begin with one of a few long texts and end on their own."""
    rng = Random(seed)
    return [
        Prompt(at, chain(f"shared {rng.randrange(prefixes)}", 40) + chain(f"own {n}", 4), 20)
        for n, at in enumerate(poisson(rng, per_s, count))
    ]


@pytest.mark.parametrize("seed", [1, 2, 3])
def test_shared_prefixes_settle_on_replicas_and_no_replica_starves(seed: int) -> None:
    prompts = shared(seed, per_s=12, count=500, prefixes=40)
    priced, counted = (
        Fleet(p, [SPEED] * 4, cache_blocks=600).run(prompts) for p in (Policy.CPR, Policy.LEAST_REQUESTS)
    )
    work = [engine.work for engine in priced.engines]
    assert priced.hit_share > 2 * counted.hit_share
    assert sum(work) < 0.5 * sum(engine.work for engine in counted.engines)
    assert min(work) > 0.5 * mean(work)
    assert max(work) < 2 * mean(work)
    assert priced.ttft_s < 0.2 * counted.ttft_s


class Unpriced(Pricing):
    """Work for others costs nothing."""

    def price(self, wait_s: float, tokens_per_s: float) -> float:
        return 0.0


@pytest.mark.interpreted
@pytest.mark.parametrize("seed", [1, 2, 3])
def test_routing_without_the_price_thrashes_prefix_caches(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    prompts = shared(seed, per_s=18, count=500, prefixes=40)
    priced, unpriced = (Fleet(Policy.CPR, [SPEED] * 4, cache_blocks=600) for _ in range(2))
    unpriced.pricing = Unpriced(unpriced.pricing.index)
    priced.run(prompts)
    monkeypatch.setattr(cpr, "PAUSE", 0.0)
    unpriced.run(prompts)
    assert sum(e.work for e in priced.engines) < 0.7 * sum(e.work for e in unpriced.engines)
    assert priced.ttft_s < 0.6 * unpriced.ttft_s


def test_a_hot_prefix_stays_with_its_owner_until_the_queue_there_grows() -> None:
    def shares(per_s: float) -> list[float]:
        rng = Random(3)
        hot = [
            Prompt(at, chain("hot", 20) + chain(f"own {n}", 8), 20) for n, at in enumerate(poisson(rng, per_s, 300))
        ]
        fleet = Fleet(Policy.CPR, [SPEED] * 4).run(hot)
        return sorted(len(engine.ttfts) / len(hot) for engine in fleet.engines)

    assert shares(1)[-1] > 0.8
    assert shares(30)[0] > 0.15


def test_the_prefixes_of_a_removed_replica_do_not_all_move_to_one_survivor() -> None:
    prompts = shared(4, per_s=12, count=600, prefixes=60)
    fleet = Fleet(Policy.CPR, [SPEED] * 6, cache_blocks=800)
    fleet.at(prompts[300].at, lambda: fleet.remove("chat-0"))
    fleet.run(prompts)
    before, after = (
        {prompt.blocks[0]: id for prompt, id in list(zip(prompts, fleet.placed, strict=True))[part]}
        for part in (slice(300), slice(301, 600))
    )
    moved = Counter(after[prefix] for prefix, id in before.items() if id == "chat-0" and prefix in after)
    assert moved.total() >= 5
    assert "chat-0" not in after.values()
    assert max(moved.values()) <= 0.6 * moved.total()
    kept = [id == after[prefix] for prefix, id in before.items() if id != "chat-0" and prefix in after]
    assert mean(kept) > 0.6


@pytest.mark.parametrize("replicas", [2, 5])
def test_a_replica_that_was_slow_at_first_gets_requests_again(replicas: int) -> None:
    fleet = Fleet(Policy.CPR, [SPEED / 50] + [SPEED] * (replicas - 1))
    fleet.at(8.0, lambda: setattr(fleet.engines[0], "speed", SPEED))
    fleet.run([Prompt(at, (), 200) for at in poisson(Random(6), 6 * replicas, 500 * replicas)])
    first, last = (fleet.placed[after : after + 100 * replicas].count("chat-0") for after in (0, 400 * replicas))
    assert first < 20
    assert last > 10


def test_full_fleet_is_fully_used_and_answers_all_requests() -> None:
    fleet = Fleet(Policy.CPR, [SPEED] * 2, room=3).run(shared(5, per_s=40, count=200, prefixes=10))
    assert fleet.under_way == 0
    assert not fleet.waiting
    assert all(engine.load == engine.meter.queue_tokens == 0 for engine in fleet.engines)
    assert math.isfinite(fleet.ttft_s)
