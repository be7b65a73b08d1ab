"""Figures in ranges that grow."""

import math

import pytest

from forebay.core.rollout.sketch import GROWTH, quantile, with_figures


@pytest.mark.parametrize("share", [0.0, 0.5, 0.99, 1.0])
def test_sketch_quantile_is_the_upper_end_of_its_bucket(share: float) -> None:
    sketch = with_figures({}, [0.1] * 50 + [1.0] * 49 + [5.0])
    found = quantile(sketch, share, 100)
    assert found is not None
    expected = sorted([0.1] * 50 + [1.0] * 49 + [5.0])[max(math.ceil(share * 100) - 1, 0)]
    assert expected <= found * 1.000001 <= expected * math.exp(GROWTH) * 1.000002
    assert quantile(sketch, share, 101) is None
