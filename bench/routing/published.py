"""The experiment of Mooncake's figure 5 (Qin et al., FAST'25): the whole conversation trace, placed in four ways."""

from collections.abc import Iterator
from typing import Final

from grid import SEEDS, Change, Job, Load

POLICIES: Final = ("plain_random", "plain_least_requests", "smg_cache_aware", "cpr")
REQUESTS: Final = 12_031
SEEDS_USED: Final = 3
"""A whole trace differs less from draw to draw than its parts."""
A800: Final = {"gpu": "a100_sxm", "tensor_parallel": 8}
"""The paper has 16 nodes of 8 A800, which compute as A100 do; the model has the shape of Llama 3 70B."""
SETUPS: Final = {
    "16 replicas, as published": (16, 1.0),
    "8 replicas": (8, 1.0),
    "8 replicas, x1.3": (8, 1.3),
}
"""Title → replicas and speed. The paper's nodes read prompts or decode, ours do both; and its engine is another one.

At the same speed ours have much less to do, so that queues are short. The last ones come near to the paper's own
time for random placement.
"""


def published() -> Iterator[Job]:
    """All replays of it."""
    for title, (replicas, speed) in SETUPS.items():
        for seed in SEEDS[:SEEDS_USED]:
            for policy in POLICIES:
                load = Load("conversation", "mooncake", speed, REQUESTS)
                yield Job(title, policy, seed, load, Change(settings={**A800, "replicas": replicas}))
