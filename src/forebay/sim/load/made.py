"""Generated workloads: each shows one effect that a routing policy must handle."""

from collections.abc import Iterator
from itertools import count, islice
from random import Random
from typing import Final, NamedTuple

from forebay.sim.load.columns import columns
from forebay.sim.load.values import Arrival, Workload

BLOCK_TOKENS: Final = 512
CONTEXT_TOKENS_MAX: Final = 131_072
"""A conversation ends before it exceeds the context of the models in the engine data."""
ANSWER_S_PER_TOKEN: Final = 0.03
"""Assumed response time per token within a conversation."""
REQUESTS: Final = 4_000
RATE_PER_S: Final = 20.0
"""Default request rate (see `--speed`): in the middle of the 3 to 60 of llm-d's benchmark."""


class Length(NamedTuple):
    """A log-normal number of tokens; constant if `sigma` is 0."""

    median: int
    sigma: float = 0.0

    def draw(self, rng: Random) -> int:
        """One length, at least 1."""
        return max(1, round(self.median * rng.lognormvariate(0.0, self.sigma))) if self.sigma else self.median


PROMPT: Final = Length(1_000, 0.8)
QUESTION: Final = Length(400, 0.6)
ANSWER: Final = Length(200, 0.6)


def gaps_s(rate_per_s: float, cv: float, rng: Random) -> Iterator[float]:
    """Endless times between requests: gamma-distributed, as ServeGen found for clients (arXiv 2505.09999).

    `cv` is their coefficient of variation: 1 is a Poisson process, more is bursty.
    """
    shape = 1 / cv**2
    while True:
        yield rng.gammavariate(shape, 1 / (shape * rate_per_s))


def at_random(
    rng: Random,
    *,
    requests: int = REQUESTS,
    rate_per_s: float = RATE_PER_S,
    cv: float = 1.0,
    prompt: Length = PROMPT,
    output: Length = ANSWER,
) -> Workload:
    """Requests without shared prefixes: a Poisson process, or bursts if `cv` is above 1."""
    at = 0.0
    arrivals = []
    for gap in islice(gaps_s(rate_per_s, cv, rng), requests):
        at += gap
        prompt_tokens = min(prompt.draw(rng), CONTEXT_TOKENS_MAX)
        arrivals.append(Arrival(at, prompt_tokens, output.draw(rng)))
    return Workload("poisson" if cv == 1 else f"burst (cv {cv:g})", columns(arrivals), BLOCK_TOKENS)


def burst(rng: Random) -> Workload:
    """Requests without shared prefixes, in bursts."""
    return at_random(rng, cv=4.0)


def hot_prefix(
    rng: Random,
    *,
    requests: int = REQUESTS,
    rate_per_s: float = RATE_PER_S,
    prefix_tokens: int = 8_192,
    share: float = 0.9,
    question: Length = QUESTION,
    output: Length = ANSWER,
) -> Workload:
    """One prefix shared by a `share` of all requests; the others are as long, and unique.

    A policy that only considers caches sends nearly all of it to one replica.
    """
    ids, at = count(), 0.0
    hot = _chain((), prefix_tokens // BLOCK_TOKENS * BLOCK_TOKENS, ids)
    arrivals = []
    for gap in islice(gaps_s(rate_per_s, 1.0, rng), requests):
        at += gap
        prompt_tokens = prefix_tokens + question.draw(rng)
        begin = hot if rng.random() < share else ()
        arrivals.append(Arrival(at, prompt_tokens, output.draw(rng), _chain(begin, prompt_tokens, ids)))
    return Workload("hot-prefix", columns(arrivals), BLOCK_TOKENS)


def tenants(
    rng: Random,
    *,
    requests: int = REQUESTS,
    rate_per_s: float = RATE_PER_S,
    tenants: int = 150,
    users: int = 5,
    prefix_tokens: int = 6_000,
    question_tokens: int = 1_200,
    output_tokens: int = 1_000,
) -> Workload:
    """Tenants with a long prefix each, whose users repeat one question each.

    The defaults are those of llm-d's benchmark of precise prefix routing (`shared_prefix` of inference-perf: 150
    groups of 5 prompts, 6,000 + 1,200 tokens in, 1,000 out): 1.1 million tokens in all, more than one replica can
    cache. `users` 0: every question is new.
    """
    ids, at = count(), 0.0
    whole = prefix_tokens // BLOCK_TOKENS * BLOCK_TOKENS
    prompt_tokens = prefix_tokens + question_tokens
    prefixes = [_chain((), whole, ids) for _ in range(tenants)]
    prompts = [[_chain(prefix, prompt_tokens, ids) for _ in range(users)] for prefix in prefixes]
    arrivals = []
    for gap in islice(gaps_s(rate_per_s, 1.0, rng), requests):
        at += gap
        tenant = rng.randrange(tenants)
        blocks = rng.choice(prompts[tenant]) if users else _chain(prefixes[tenant], prompt_tokens, ids)
        arrivals.append(Arrival(at, prompt_tokens, output_tokens, blocks, f"tenant-{tenant}"))
    return Workload("tenants", columns(arrivals), BLOCK_TOKENS)


def multi_turn(
    rng: Random,
    *,
    span_s: float = 600.0,
    rate_per_s: float = 2.0,
    turns: float = 5.0,
    think_s: float = 30.0,
    system_tokens: int = 1_024,
    question: Length = QUESTION,
    output: Length = ANSWER,
) -> Workload:
    """Conversations: each prompt is the previous one, its answer, and a new question.

    `rate_per_s` is that of new conversations, `turns` the mean number of questions, `think_s` the mean time from an
    answer to the next question. Open loop: late answers delay nothing. All share a system prompt. Requests after
    `span_s` are left out.
    """
    ids = count()
    system = _chain((), system_tokens // BLOCK_TOKENS * BLOCK_TOKENS, ids)
    arrivals: list[Arrival] = []
    gaps = gaps_s(rate_per_s, 1.0, rng)
    begun = 0.0
    while (begun := begun + next(gaps)) < span_s:
        at, blocks, tokens = begun, system, system_tokens
        while at < span_s:
            tokens += question.draw(rng)
            output_tokens = output.draw(rng)
            if tokens + output_tokens > CONTEXT_TOKENS_MAX:
                break
            blocks = _chain(blocks, tokens, ids)
            arrivals.append(Arrival(at, tokens, output_tokens, blocks))
            blocks = blocks[: tokens // BLOCK_TOKENS]  # the rest of the last block is not known yet
            tokens += output_tokens
            if rng.random() * turns < 1:
                break
            at += output_tokens * ANSWER_S_PER_TOKEN + rng.expovariate(1 / think_s)
    return Workload("multi-turn", columns(arrivals).in_order(), BLOCK_TOKENS)


def _chain(begin: tuple[int, ...], prompt_tokens: int, ids: "count[int]") -> tuple[int, ...]:
    """Blocks of a prompt that starts with the given whole blocks and continues with unique ones."""
    return begin + tuple(islice(ids, -(-prompt_tokens // BLOCK_TOKENS) - len(begin)))
