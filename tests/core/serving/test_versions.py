"""Which versions of a model are served."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from forebay.core.serving.config import VersionPolicy, VersionRule
from forebay.core.serving.versions import Change, change, chosen_versions, missing, none_available

NUMBERS = st.sets(st.integers(0, 9))


@pytest.mark.parametrize(
    ("policy", "found", "chosen", "lacking"),
    [
        (VersionPolicy(), {1, 2, 10}, (10,), ()),
        (VersionPolicy(count=2), {10, 2, 1}, (2, 10), ()),
        (VersionPolicy(count=9), {3, 1}, (1, 3), ()),
        (VersionPolicy(), set(), (), ()),
        (VersionPolicy(VersionRule.ALL), {7, 3}, (3, 7), ()),
        (VersionPolicy(VersionRule.SPECIFIC, versions=(5, 1, 4)), {1, 2, 5}, (1, 5), (4,)),
        (VersionPolicy(VersionRule.SPECIFIC, versions=(4,)), {1}, (), (4,)),
    ],
)
def test_version_policy_selects_among_existing_versions(
    policy: VersionPolicy, found: set[int], chosen: tuple[int, ...], lacking: tuple[int, ...]
) -> None:
    assert chosen_versions(policy, found) == chosen
    assert missing(policy, found) == lacking


def test_a_model_without_a_version_is_refused_in_tritons_words() -> None:
    assert none_available("m") == "at least one version must be available under the version policy of model 'm'"


@given(served=NUMBERS, chosen=NUMBERS, changed=NUMBERS)
def test_version_change_results_in_exactly_the_chosen_versions(
    served: set[int], chosen: set[int], changed: set[int]
) -> None:
    load, keep, unload = what = change(served, chosen, changed)
    assert (served - set(unload)) | set(load) == chosen
    assert not set(keep) & set(load)
    assert set(keep) | set(load) == chosen
    assert set(load) & served == chosen & served & changed
    assert what == Change(*map(tuple, map(sorted, what)))
