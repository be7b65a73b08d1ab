"""The currency in which gateways and workers speak of prompts: chained hashes of blocks of their JSON.

That two prompts begin alike shows in their JSON just as well as in their tokens, and a block of it stands for the
tokens that its model makes of it.
"""

from struct import Struct
from typing import Final

from xxhash import xxh3_64_intdigest

from forebay.core.model import BlockNews

BLOCK_BYTES: Final = 512
BLOCKS_MAX: Final = 512
"""Blocks of a longer prompt are not told apart any more."""
CHANGES_MAX: Final = 4096
"""Most blocks that one report names; also how many a worker says that its engine holds (2 MiB of JSON)."""
HASH_MAX: Final = 2**64 - 1
SEQ_MAX: Final = 2**63 - 1
_cut = Struct(f"{BLOCK_BYTES}s").iter_unpack  # a memoryview of each block would take longer than its hash


def blocks(prompt: memoryview, model: str) -> tuple[int, ...]:
    """Chained hashes of the whole blocks of a prompt, alike in every process. A collision costs a cache miss."""
    digest = xxh3_64_intdigest  # looked up once
    hashed = digest(model.encode())
    size = min(len(prompt), BLOCKS_MAX * BLOCK_BYTES)
    found = []
    for (block,) in _cut(prompt[: size - size % BLOCK_BYTES]):
        hashed = digest(block, hashed)
        found.append(hashed)
    return tuple(found)


def flaw(news: BlockNews, asked: int) -> str:
    """What is wrong with the changes that a worker reports since `asked`; empty if they can be believed."""
    named = (*news.stored, *news.removed)
    if len(named) > CHANGES_MAX:
        return f"{len(named)} blocks in one report; {CHANGES_MAX} are allowed"
    if named and not 0 <= min(named) <= max(named) <= HASH_MAX:
        return "a block is no hash of 64 bits"
    if not 0 < news.seq <= SEQ_MAX:
        return "its number is out of range"
    if not news.reset and not 0 < asked <= news.seq:
        return f"change {news.seq} does not follow {asked}"
    return ""
