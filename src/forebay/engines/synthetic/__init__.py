"""An engine without a model: deterministic text and vectors with configurable timing. For tests and dry runs."""

from forebay.engines.synthetic.engine import SyntheticEngine

__all__ = ["SyntheticEngine"]
