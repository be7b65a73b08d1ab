"""Slots of two revisions, the shares published to gateways, and why replicas end."""

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from forebay.core.deploy.counting import Cursor, advanced
from forebay.core.deploy.course import COURSES, Course, Kind, replicas_for
from forebay.core.deploy.crashes import harm_of
from forebay.core.deploy.rollout import ModelObservation, Phase, Rollout
from forebay.core.deploy.samples import Observed
from forebay.core.deploy.slots import Held, lowest, resized, with_canary, with_stable
from forebay.core.deploy.splitting import counts_from, split_of
from forebay.core.model import Sticky
from forebay.core.rollout.guards import Harm

INDICES = st.sets(st.integers(0, 12), max_size=6)


def test_a_promoted_canary_keeps_its_slots_and_the_next_one_takes_the_others() -> None:
    held = with_canary(Held((0, 1)), 1)
    assert (held, held.spare) == (Held((0, 1), (3,)), 2)
    held = with_canary(held, 2)
    assert held == Held((0, 1), (3, 4))
    after = with_canary(Held(held.canary), 2)
    assert (after, after.spare) == (Held((3, 4), (1, 2)), 0)


@given(INDICES, INDICES, st.integers(0, 8), st.integers(0, 8))
def test_slots_are_never_shared_and_are_kept_when_possible(
    stable: set[int], canary: set[int], more: int, several: int
) -> None:
    held = Held(tuple(sorted(stable)), tuple(sorted(canary - stable)))
    for after in (with_stable(held, several), with_canary(held, several)):
        assert not set(after.stable) & set(after.canary)
        assert after.spare not in (*after.stable, *after.canary)
        assert list(after.stable) == sorted(after.stable)
        assert list(after.canary) == sorted(after.canary)
    grown, shrunk = with_stable(held, len(held.stable) + more), with_stable(held, min(several, len(held.stable)))
    assert set(held.stable) <= set(grown.stable)
    assert set(shrunk.stable) <= set(held.stable)
    assert with_stable(grown, len(grown.stable)) == grown
    rolled = with_canary(held, several)
    assert len(rolled.canary) == several
    assert held.spare not in rolled.canary or held.spare in held.canary
    assert with_canary(rolled, several) == rolled


@given(INDICES, st.integers(0, 8), INDICES)
def test_revision_holds_the_wanted_number_of_slots(held: set[int], several: int, taken: set[int]) -> None:
    found = resized(held, several, taken)
    assert len(found) == len(set(found)) == several
    assert not (set(found) - held) & taken
    assert lowest(found) not in found


def rollout(kind: Kind = Kind.CANARY, **changes: Any) -> Rollout:
    begun = Rollout("chat:1", "chat", "r-old", "r-new", COURSES[kind], since=100.0)
    return replace(begun, **changes)


@given(
    st.floats(0.0, 1.0),
    st.integers(0, 9),
    st.one_of(st.none(), st.integers(0, 12)),
    st.booleans(),
    st.sampled_from(sorted(Kind)),
)
def test_no_published_share_exceeds_what_ready_replicas_carry(
    share: float, replicas: int, ready: int | None, withdrawn: bool, kind: Kind
) -> None:
    split = split_of(rollout(kind, share=share), ModelObservation(replicas, replicas, ready), withdrawn)
    told = split.mirrored if kind is Kind.SHADOW else split.share
    assert 0.0 <= told <= share
    assert (split.share if kind is Kind.SHADOW else split.mirrored) == 0.0
    assert not (withdrawn and told)
    if ready is not None and told:
        assert ready >= min(replicas_for(told, max(replicas, 1)), max(1, told * replicas - 1e-9))
    if not withdrawn and (ready is None or ready >= replicas_for(share, max(replicas, 1))):
        assert told == share
    assert split.sticky is (Sticky.CALLER if kind is Kind.AB else Sticky.REQUEST)


def test_comparison_step_begins_with_a_warm_up() -> None:
    assert counts_from(rollout()) == 0.0
    assert counts_from(rollout(phase=Phase.COMPARING)) == 100.0 + Course().warm_up_s


@pytest.mark.parametrize(
    ("words", "harm"),
    [
        ("chat-3: generation 1 was killed by signal 9 (SIGKILL)", Harm.CRASH),
        ("generation 1 ended with exit code 1\nCUDA error: Out Of Memory", Harm.OUT_OF_MEMORY),
        ("terminate called after throwing an instance of 'std::bad_alloc'", Harm.OUT_OF_MEMORY),
        ("MemoryError", Harm.OUT_OF_MEMORY),
        ("torch.OutOfMemoryError: HIP out of memory", Harm.OUT_OF_MEMORY),
        ("ggml_aligned_malloc: Cannot allocate memory", Harm.OUT_OF_MEMORY),
        ("", Harm.CRASH),
    ],
)
def test_out_of_memory_is_distinguished_from_other_exits(words: str, harm: Harm) -> None:
    assert harm_of(words) is harm


def test_silent_gateway_keeps_its_cursor() -> None:
    before = {"gateway-0": Cursor("a", 5), "gateway-1": Cursor("b", 7)}
    assert advanced(before, {"gateway-0": Observed("c", 2)}) == {
        "gateway-0": Cursor("c", 2),
        "gateway-1": Cursor("b", 7),
    }
