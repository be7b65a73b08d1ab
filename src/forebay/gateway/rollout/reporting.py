"""Observations of models that are being rolled out, which control polls: samples and pairs."""

import re
from collections import deque
from itertools import takewhile
from typing import Final, TypeVar

from forebay.core.deploy.samples import Observed, Pair, Sample

SAMPLES_MAX: Final = 16_384
"""Several seconds' worth at the full rate of a gateway process, about 4 MB. Control polls about every second."""
PAIRS_MAX: Final = 256
"""Each takes up to about 24 KB."""
PAGE_SAMPLES_MAX: Final = 1000
"""Maximum per response: more would block the event loop for too long."""
PAGE_PAIRS_MAX: Final = 32
AFTER: Final = re.compile(rb"(?:^|[?&])after=(\d{1,18})(?:&|$)")
INSTANCE: Final = re.compile(rb"(?:^|[?&])instance=([0-9a-z]{1,64})(?:&|$)")
T = TypeVar("T")


class Observations:
    """Two ring buffers. Samples are numbered consecutively, and a pair has the number of the sample that completed
    it.

    `instance` identifies this start of the gateway.
    """

    __slots__ = ("_number", "_pairs", "_samples", "instance")

    def __init__(self, instance: str) -> None:
        self.instance = instance
        self._number = 0
        self._samples: deque[tuple[int, Sample]] = deque(maxlen=SAMPLES_MAX)
        self._pairs: deque[tuple[int, Pair]] = deque(maxlen=PAIRS_MAX)

    def note(self, sample: Sample, pair: Pair | None = None) -> None:
        """Keep a sample, and the pair that it completes."""
        self._number += 1
        self._samples.append((self._number, sample))
        if pair is not None:
            self._pairs.append((self._number, pair))

    def after(self, number: int, instance: str) -> Observed:
        """Everything after `number` of `instance`, one page of it; if the instance differs, from the beginning."""
        if instance != self.instance:
            number = 0
        samples = _since(self._samples, number)[:PAGE_SAMPLES_MAX]
        if not samples:
            return Observed(self.instance, min(number, self._number))
        last = samples[-1][0]
        pairs = [each for each in _since(self._pairs, number) if each[0] <= last]
        if len(pairs) > PAGE_PAIRS_MAX:
            last = pairs[PAGE_PAIRS_MAX][0] - 1
        return Observed(
            self.instance,
            last,
            tuple(sample for at, sample in samples if at <= last),
            tuple(pair for at, pair in pairs if at <= last),
            missed=samples[0][0] - 1 - number,
        )

    def asked(self, target: bytes) -> Observed:
        """The response to `GET /observations?after=N&instance=I`; without a number, or for another instance:
        everything."""
        after, instance = AFTER.search(target), INSTANCE.search(target)
        return self.after(int(after[1]) if after else 0, instance[1].decode() if instance else "")


def _since(ring: deque[tuple[int, T]], number: int) -> list[tuple[int, T]]:
    """The items with a higher number, in order: usually a small part at the end."""
    return list(takewhile(lambda each: each[0] > number, reversed(ring)))[::-1]
