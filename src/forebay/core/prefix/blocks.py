"""Chained hashes of blocks of a prompt's JSON, by which gateways and workers identify prefixes.

Prompts with equal prefixes have equal prefixes in their JSON too, and a block of JSON stands for the tokens that the
model makes of it.
"""

from struct import Struct
from typing import Final

from xxhash import xxh3_64_intdigest

from forebay.core.model import BlockNews

BLOCK_BYTES: Final = 512
BLOCKS_MAX: Final = 512
"""Most blocks per prompt; the rest of a longer prompt is ignored."""
CHANGES_MAX: Final = 4096
"""Most blocks in one report; also the most that a worker reports as cached (2 MiB of JSON)."""
HASH_MAX: Final = 2**64 - 1
SEQ_MAX: Final = 2**63 - 1
_cut = Struct(f"{BLOCK_BYTES}s").iter_unpack  # slicing a memoryview per block would take longer than hashing it


def blocks(prompt: memoryview, model: str) -> tuple[int, ...]:
    """Chained hashes of the whole blocks of a prompt, the same in every process. A collision costs a cache miss."""
    digest = xxh3_64_intdigest  # local lookup is faster
    hashed = digest(model.encode())
    size = min(len(prompt), BLOCKS_MAX * BLOCK_BYTES)
    found = []
    for (block,) in _cut(prompt[: size - size % BLOCK_BYTES]):
        hashed = digest(block, hashed)
        found.append(hashed)
    return tuple(found)


def flaw(news: BlockNews, asked: int) -> str:
    """What is wrong with a worker's reported changes since `asked`; empty: nothing."""
    named = (*news.stored, *news.removed)
    if len(named) > CHANGES_MAX:
        return f"{len(named)} blocks in one report; {CHANGES_MAX} are allowed"
    if named and not 0 <= min(named) <= max(named) <= HASH_MAX:
        return "a block is not a 64-bit hash"
    if not 0 < news.seq <= SEQ_MAX:
        return "the sequence number is out of range"
    if not news.reset and not 0 < asked <= news.seq:
        return f"change {news.seq} does not follow {asked}"
    return ""
