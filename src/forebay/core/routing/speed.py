"""Learns from finished requests how fast a replica is, and how long prompts and responses are."""

from typing import Final

DECAY: Final = 0.97
"""Weight of each sample relative to the next: about the last thirty count."""
SAMPLES_MIN: Final = 3
"""Fewer are not used: the first request after a start often waits for a compilation."""
PRIOR_WEIGHT: Final = 0.5
"""Weight of the assumed slope, in samples one mean away from the mean; it dominates while x hardly varies."""
FLATTEST: Final = 0.5
"""Lower bound as a share of the assumed slope: noise in x flattens any fitted line."""
OUTLIER: Final = 4.0
"""Samples are clipped to this factor of the expected value."""
LENGTH_STEP: Final = 0.05
"""Least weight of a new sample in the mean lengths."""
LONGEST_DECAY: Final = 0.99
"""Decay of the longest response with each shorter one: it is remembered for some hundreds of responses."""
TOKENS_PER_BYTE: Final = 0.25
"""Assumed until the first response, like the next three: English prose in JSON."""
OUTPUT_TOKENS: Final = 256.0
PACE_S: Final = 0.02
"""Seconds per output token."""
PROMPT_TOKENS: Final = 1024.0


class Line:
    """y = base + slope·x, both not negative, by least squares over exponentially weighted samples.

    While x does not vary, the slope is `assumed` (0..1) times mean y over mean x: 1 is a line through the origin, 0 a
    constant. It never falls below half of that, nor exceeds mean y over mean x, where the base would be negative.
    """

    __slots__ = ("_cross", "_spread", "_weight", "assumed", "samples", "x", "y")

    def __init__(self, assumed: float) -> None:
        self.assumed = assumed
        self.samples = 0
        self.x = 0.0
        self.y = 0.0
        self._weight = 0.0
        self._spread = 0.0
        self._cross = 0.0

    def add(self, x: float, y: float) -> None:
        """Add a sample; both numbers are above 0."""
        if self.samples >= SAMPLES_MIN:
            expected = self.at(x)
            y = min(max(y, expected / OUTLIER), expected * OUTLIER)
        self.samples += 1
        self._weight = DECAY * self._weight + 1.0
        off = x - self.x
        self.x += off / self._weight
        self.y += (y - self.y) / self._weight
        self._spread = DECAY * self._spread + off * (x - self.x)
        self._cross = DECAY * self._cross + off * (y - self.y)

    def scale(self, factor: float) -> None:
        """Scale all samples' y by a factor."""
        self.y *= factor
        self._cross *= factor

    def at(self, x: float) -> float:
        """The expected y at x (not negative). Needs at least one sample."""
        return self.y + self.slope() * (x - self.x)

    def slope(self) -> float:
        """The slope of the line. Needs at least one sample."""
        steepest = self.y / self.x
        prior = self.assumed * steepest
        weight = PRIOR_WEIGHT * self.x * self.x
        slope = (self._cross + weight * prior) / (self._spread + weight)
        return min(max(slope, FLATTEST * prior), steepest)


class Lengths:
    """Prompt and response lengths of one model: exponentially weighted means of the replicas' token counts.

    `output_tokens`: what is assumed of responses until one is complete; 0 for models that generate no tokens.
    """

    __slots__ = ("_assumed", "_longest", "_samples", "output_tokens", "pace_s", "prompt_tokens", "tokens_per_byte")

    def __init__(self, output_tokens: float = OUTPUT_TOKENS) -> None:
        self.tokens_per_byte = TOKENS_PER_BYTE
        self.output_tokens = self._assumed = output_tokens
        self.pace_s = PACE_S
        """Time per output token, seconds."""
        self.prompt_tokens = PROMPT_TOKENS
        self._samples = 0
        self._longest: dict[str, float] = {}
        """Length of the longest recent response, tokens, by tenant."""

    def learn(self, body_bytes: int, prompt_tokens: int, output_tokens: int) -> None:
        """A request of this size has been answered completely."""
        self._samples += 1
        step = max(LENGTH_STEP, 1 / self._samples)
        per_byte, output, prompt = self.tokens_per_byte, self.output_tokens, self.prompt_tokens
        self.tokens_per_byte += step * (_clip(prompt_tokens / body_bytes, per_byte, TOKENS_PER_BYTE) - per_byte)
        self.output_tokens += step * (_clip(output_tokens, output, OUTPUT_TOKENS) - output)
        self.prompt_tokens += step * (_clip(prompt_tokens, prompt, PROMPT_TOKENS) - prompt)

    def learn_longest(self, tenant: str, output_tokens: int) -> None:
        """A response to this tenant, without a limit on its length, had `output_tokens`."""
        longest = LONGEST_DECAY * self.longest_tokens(tenant)
        self._longest[tenant] = max(longest, _clip(output_tokens, longest, OUTPUT_TOKENS))

    def longest_tokens(self, tenant: str) -> float:
        """About the longest recent response to a tenant's requests without a length limit."""
        return self._longest.get(tenant, self._assumed)

    def learn_pace(self, seconds: float) -> None:
        """A response took `seconds` per output token."""
        self.pace_s += LENGTH_STEP * (_clip(seconds, self.pace_s, PACE_S) - self.pace_s)

    def tokens(self, body_bytes: int) -> int:
        """Expected prompt tokens of a request of this size; 0 for an empty body."""
        return max(1, int(body_bytes * self.tokens_per_byte + 0.5)) if body_bytes else 0


def _clip(sample: float, mean: float, assumed: float) -> float:
    """Clip a sample, so that one replica's wrong count cannot make every later request look too long to admit."""
    return min(sample, OUTLIER * max(mean, assumed))
