"""A router's own bookkeeping of caches and queues: what it has sent, and what has returned."""

from collections import OrderedDict, deque
from collections.abc import Iterable, Sequence

from forebay.sim.rivals.values import RoutedRequest, State


class Owners:
    """Block → bit set of replicas. A block stands for its whole prefix, so one walk answers for all replicas."""

    __slots__ = ("_bits", "owners")

    def __init__(self) -> None:
        self.owners: dict[int, int] = {}
        self._bits: dict[str, int] = {}

    def bit(self, id: str) -> int:
        """The bit of a replica."""
        bit = self._bits.get(id)
        if bit is None:
            bit = self._bits[id] = 1 << len(self._bits)
        return bit

    def depths(self, blocks: Sequence[int], ids: Iterable[str]) -> list[int]:
        """Length of the matching prefix at each of these replicas, in blocks."""
        bits = [self.bit(id) for id in ids]
        owners = self.owners.get
        holders = sum(bits)
        ends: dict[int, int] = {}
        depth = 0
        for block in blocks:
            lost = holders & ~owners(block, 0)
            if lost:
                holders ^= lost
                while lost:
                    bit = lost & -lost
                    ends[bit] = depth
                    lost ^= bit
                if not holders:
                    break
            depth += 1
        return [ends.get(bit, depth) for bit in bits]

    def drop(self, block: int, bit: int) -> None:
        """Remove a block of a replica."""
        rest = self.owners[block] & ~bit
        if rest:
            self.owners[block] = rest
        else:
            del self.owners[block]


class Lately(Owners):
    """Blocks sent to each replica, in LRU order."""

    __slots__ = ("_used",)

    def __init__(self) -> None:
        super().__init__()
        self._used: dict[str, OrderedDict[int, None]] = {}

    def add(self, id: str, blocks: Iterable[int]) -> None:
        """Use blocks, in this order."""
        bit, owners = self.bit(id), self.owners
        used = self._used.setdefault(id, OrderedDict())
        for block in blocks:
            if block in used:
                used.move_to_end(block)
            else:
                used[block] = None
                owners[block] = owners.get(block, 0) | bit

    def trim(self, id: str, blocks_max: int) -> None:
        """Evict the least recently used blocks."""
        bit, used = self.bit(id), self._used.setdefault(id, OrderedDict())
        while len(used) > blocks_max:
            self.drop(used.popitem(last=False)[0], bit)


class Counted(Owners):
    """Reference-counted blocks of replicas."""

    __slots__ = ("_counts",)

    def __init__(self) -> None:
        super().__init__()
        self._counts: dict[str, dict[int, int]] = {}

    def add(self, id: str, blocks: Iterable[int]) -> None:
        """Add a reference to each block."""
        bit, owners = self.bit(id), self.owners
        counts = self._counts.setdefault(id, {})
        for block in blocks:
            counts[block] = counts.get(block, 0) + 1
            owners[block] = owners.get(block, 0) | bit

    def remove(self, id: str, blocks: Iterable[int]) -> None:
        """Remove a reference from each block."""
        bit, counts = self.bit(id), self._counts[id]
        for block in blocks:
            if counts[block] == 1:
                del counts[block]
                self.drop(block, bit)
            else:
                counts[block] -= 1

    def count(self, id: str) -> int:
        """Number of distinct blocks of a replica."""
        return len(self._counts.get(id, ()))


class Expected:
    """Blocks that a replica should have for a while, because a prompt with them was sent there."""

    __slots__ = ("_counted", "_sent", "_ttl_s")

    def __init__(self, ttl_s: float) -> None:
        self._ttl_s = ttl_s
        self._counted = Counted()
        self._sent: deque[tuple[float, str, tuple[int, ...]]] = deque()

    def add(self, id: str, blocks: tuple[int, ...], now: float) -> None:
        """A prompt is sent."""
        self._counted.add(id, blocks)
        self._sent.append((now + self._ttl_s, id, blocks))

    def depths(self, blocks: Sequence[int], ids: Iterable[str], now: float) -> list[int]:
        """Length of the expected prefix at each of these replicas, in blocks."""
        sent = self._sent
        while sent and sent[0][0] <= now:
            _, id, gone = sent.popleft()
            self._counted.remove(id, gone)
        return self._counted.depths(blocks, ids)


class Unread:
    """Prompt tokens sent by this gateway that have no first token yet, by replica."""

    __slots__ = ("_charges", "_tokens")

    def __init__(self) -> None:
        self._tokens: dict[str, int] = {}
        self._charges: dict[tuple[int, str], int] = {}

    def tokens(self, id: str) -> int:
        """Tokens of one replica."""
        return self._tokens.get(id, 0)

    def charge(self, request: RoutedRequest, replica: State, tokens: int) -> None:
        """A request is sent, with this many uncached prompt tokens."""
        self._charges[request.id, replica.id] = tokens
        self._tokens[replica.id] = self._tokens.get(replica.id, 0) + tokens

    def release(self, request: RoutedRequest, replica: State) -> None:
        """Its response begins, or it has ended. Further calls have no effect."""
        self._tokens[replica.id] = self.tokens(replica.id) - self._charges.pop((request.id, replica.id), 0)
