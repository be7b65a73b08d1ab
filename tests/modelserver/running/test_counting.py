"""Statistics of a decoupled model's responses."""

from forebay.modelserver.models.running import counting
from forebay.modelserver.models.running.counting import Counts, Outcome


def test_responses_are_counted_by_index_up_to_a_limit() -> None:
    counts = Counts("m", "1")
    for index in (0, 0, counting.RESPONSES_MAX - 1, counting.RESPONSES_MAX, 10**9):
        counts.response(index, 1, 2, Outcome.SUCCESS)
    found = {index: each.success.count for index, each in counts.statistics.responses.items()}
    assert found == {"0": 2, str(counting.RESPONSES_MAX - 1): 1}
