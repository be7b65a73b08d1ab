"""How long one step of an engine takes: a formula of seven constants for each model on each hardware."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class StepTime:
    """Constants of the formula, in seconds.

    A step reads the weights and computes its new tokens, and the longer of both decides: a smooth maximum, sharper
    with more `power`. Attention and the bookkeeping of each sequence come on top.
    """

    fixed_s: float
    weights_s: float
    """To read the weights once."""
    token_s: float
    """For each new token, in the matrices."""
    power: float
    square_s: float
    """For each pair of a token that is read and one before it."""
    context_s: float
    """For each token that a decoding sequence looks back at."""
    sequence_s: float

    def step_s(self, new_tokens: float, prefill_square: float, context_tokens: int, sequences: int) -> float:
        """Of a step that computes `new_tokens`: those of prompts, and one for each of the decoding `sequences`.

        `prefill_square` is the sum of n·(c + n/2) over what is read of prompts: n tokens after c in the cache.
        `context_tokens` is the sum of the lengths of the decoding sequences.
        """
        power = self.power
        matrices_s: float = (self.weights_s**power + (self.token_s * new_tokens) ** power) ** (1.0 / power)
        return (
            self.fixed_s
            + matrices_s
            + self.square_s * prefill_square
            + self.context_s * context_tokens
            + self.sequence_s * sequences
        )

    def scaled(self, factor: float) -> "StepTime":
        """Steps that take `factor` times as long: claims are to hold at 0.8, 1 and 1.25."""
        return StepTime(
            self.fixed_s * factor,
            self.weights_s * factor,
            self.token_s * factor,
            self.power,
            self.square_s * factor,
            self.context_s * factor,
            self.sequence_s * factor,
        )
