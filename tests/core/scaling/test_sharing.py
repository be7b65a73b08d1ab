"""`limits`: the total is never exceeded; `min` first, then fair shares that do not flap."""

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from forebay.core.cluster import Cluster, conflicts
from forebay.core.placement.settings import PlacementSettings
from forebay.core.scaling.limits import ClusterLimits, gpus_of, limit_conflicts
from forebay.core.scaling.sharing import GPU, Claim, Limits, shared, why_not


def gpu(model: str, wanted: int, least: int = 0, each: float = 1, **more: Any) -> Claim:
    return Claim(model, wanted, least, gpus=round(each * GPU), **more)


EIGHT = Limits(8 * GPU)


@pytest.mark.parametrize(
    ("limits", "claims", "got"),
    [
        (Limits(), [gpu("a", 900), gpu("b", 1000)], [900, 1000]),
        (EIGHT, [gpu("a", 3), gpu("b", 5)], [3, 5]),
        (EIGHT, [gpu("a", 9), gpu("b", 9)], [4, 4]),
        (EIGHT, [gpu("a", 2), gpu("b", 9)], [2, 6]),
        (EIGHT, [gpu("a", 9, 6), gpu("b", 9)], [6, 2]),
        (EIGHT, [gpu("a", 9, weight=3.0), gpu("b", 9)], [6, 2]),
        (EIGHT, [gpu("a", 7, low=True), gpu("b", 5)], [3, 5]),
        (EIGHT, [gpu("a", 7, 4, low=True), gpu("b", 5)], [4, 4]),
        (EIGHT, [gpu("a", 9, has=5, kept=5), gpu("b", 9)], [5, 3]),
        (EIGHT, [gpu("a", 9, has=5, kept=5), gpu("b", 9, 4)], [4, 4]),
        (Limits(7 * GPU), [gpu("a", 9), gpu("b", 9)], [4, 3]),
        (Limits(7 * GPU), [gpu("a", 9, has=3), gpu("b", 9, has=4)], [3, 4]),
        (EIGHT, [gpu("a", 3, each=4), gpu("b", 9)], [1, 4]),
        (Limits(7 * GPU), [gpu("a", 3, each=4), gpu("b", 9)], [1, 3]),
        (Limits(6 * GPU), [gpu("a", 3, each=4), gpu("b", 3)], [0, 3]),
        (Limits(3 * GPU), [gpu("a", 3, each=4), gpu("b", 9)], [0, 3]),
        (Limits(7 * GPU), [gpu("a", 3, 1, each=5), gpu("b", 9)], [1, 2]),
        (EIGHT, [gpu("a", 40, each=0.25), gpu("b", 9)], [16, 4]),
        (EIGHT, [gpu("a", 9), gpu("cpu", 100, each=0)], [8, 100]),
        (Limits(None, 10), [gpu("a", 9), gpu("cpu", 100, each=0)], [5, 5]),
        (Limits(8 * GPU, 10), [gpu("a", 9, each=2), gpu("cpu", 100, each=0)], [3, 7]),
        (Limits(2 * GPU), [gpu("a", 3, 2), gpu("b", 3, 2), gpu("c", 1, 1)], [1, 1, 0]),
    ],
)  # fmt: skip
def test_limits_are_shared_between_models(limits: Limits, claims: list[Claim], got: list[int]) -> None:
    assert list(shared(limits, claims).values()) == got


CLAIMS = st.lists(
    st.builds(
        Claim,
        model=st.just(""),
        wanted=st.integers(0, 12),
        least=st.integers(0, 4),
        kept=st.integers(0, 6),
        has=st.integers(0, 12),
        gpus=st.sampled_from([0, 250, 1000, 2000, 4000]),
        weight=st.sampled_from([0.5, 1.0, 2.0]),
        low=st.booleans(),
    ),
    min_size=1,
    max_size=5,
).map(lambda claims: [claim._replace(model=f"m{place}") for place, claim in enumerate(claims)])
LIMITS = st.builds(
    Limits, st.none() | st.integers(1, 20).map(lambda gpus: gpus * GPU), st.none() | st.integers(1, 30)
)


def used(claims: list[Claim], got: dict[str, int]) -> tuple[int, int]:
    return sum(got[each.model] * each.gpus for each in claims), sum(got.values())


def fits(limits: Limits, use: tuple[int, int]) -> bool:
    return all(limit is None or amount <= limit for limit, amount in zip(limits, use, strict=True))


@settings(max_examples=25, deadline=None)
@given(LIMITS, CLAIMS)
def test_shares_respect_limits_and_targets_and_include_minimums_that_fit(limits: Limits, claims: list[Claim]) -> None:
    got, least = shared(limits, claims), {each.model: min(each.least, each.wanted) for each in claims}

    assert fits(limits, used(claims, got))
    assert all(0 <= got[each.model] <= each.wanted for each in claims)
    if fits(limits, used(claims, least)):
        assert all(got[model] >= several for model, several in least.items())
    kept = {each.model: min(max(each.least, each.kept), each.wanted) for each in claims}
    if fits(limits, used(claims, kept)):
        assert all(got[model] >= several for model, several in kept.items())


@settings(max_examples=25, deadline=None)
@given(LIMITS, CLAIMS)
def test_no_usable_capacity_is_left_over_and_shortages_name_their_limit(limits: Limits, claims: list[Claim]) -> None:
    got = shared(limits, claims)
    gpus, replicas = used(claims, got)
    for claim in claims:
        if got[claim.model] < claim.wanted:
            assert not fits(limits, (gpus + claim.gpus, replicas + 1))
            assert "of `limits." in why_not(limits, claim, got, claims)


@settings(max_examples=25, deadline=None)
@given(LIMITS, CLAIMS, st.data())
def test_a_larger_target_never_gets_fewer_replicas(limits: Limits, claims: list[Claim], data: st.DataObject) -> None:
    place = data.draw(st.integers(0, len(claims) - 1))
    mine = claims[place]
    greedy = [*claims[:place], mine._replace(wanted=mine.wanted + 3), *claims[place + 1 :]]
    before, after = shared(limits, claims), shared(limits, greedy)

    assert after[mine.model] >= before[mine.model]
    if before[mine.model] < mine.wanted:
        assert after == before


@settings(max_examples=25, deadline=None)
@given(LIMITS, CLAIMS)
def test_shares_are_stable_and_independent_of_model_order(limits: Limits, claims: list[Claim]) -> None:
    got = shared(limits, claims)
    again = [each._replace(has=got[each.model]) for each in claims]

    assert shared(limits, again) == got
    assert shared(limits, claims[::-1]) == got


@settings(max_examples=25, deadline=None)
@given(st.integers(1, 20), CLAIMS)
def test_larger_limits_or_fewer_claims_never_reduce_a_share(gpus: int, claims: list[Claim]) -> None:
    alike = [each._replace(gpus=GPU) for each in claims]
    got, more = shared(Limits(gpus * GPU), alike), shared(Limits((gpus + 1) * GPU), alike)
    alone = shared(Limits(gpus * GPU), alike[:1])

    assert all(more[model] >= several for model, several in got.items())
    assert alone["m0"] >= got["m0"]


def test_exhausted_limit_names_its_users_largest_first() -> None:
    claims = [gpu("a", 9, each=0.5), gpu("b", 9), gpu("cpu", 3, each=0)]
    many = [gpu(name, 1) for name in "abcdefghij"]

    assert why_not(EIGHT, claims[0], {"a": 8, "b": 4, "cpu": 3}, claims) == (
        "all 8 of `limits.gpus` are used: a 4, b 4"
    )
    assert why_not(Limits(9 * GPU), gpu("x", 1, each=2), {"b": 8}, [claims[1]]) == (
        "8 of 9 of `limits.gpus` are used: b 8"
    )
    assert (
        why_not(Limits(None, 3), claims[2], {"cpu": 3}, [claims[2]]) == "all 3 of `limits.replicas` are used: cpu 3"
    )
    assert why_not(EIGHT, many[9], dict.fromkeys("abcdefgh", 1) | {"i": 0, "j": 0}, many) == (
        "all 8 of `limits.gpus` are used: a 1, b 1, c 1, d 1, e 1, f 1, and others"
    )


@pytest.mark.parametrize(
    ("placement", "gpus"),
    [({}, 0), ({"gpus": 2}, 2000), ({"gpus": 1, "fraction": 0.3}, 300), ({"gpus": 1, "mig": "1g.10gb"}, 1000)],
)
def test_replica_counts_the_gpus_of_its_placement(placement: dict[str, object], gpus: int) -> None:
    assert gpus_of(PlacementSettings.model_validate(placement)) == gpus


def model(name: str = "chat", **more: object) -> dict[str, object]:
    return {"name": name, "task": "chat", "source": "synthetic", "engine": "synthetic", **more}


TWO = {"gpus": 2}


@pytest.mark.parametrize(
    ("limits", "models", "found"),
    [
        ({"gpus": 4}, [model(placement=TWO, scale={"max": 9, "min": 2})], None),
        ({"gpus": 3}, [model(placement=TWO, scale={"max": 9, "min": 2})], ("limits.gpus", "3, with chat 4", "4")),
        ({"gpus": 3}, [model(placement=TWO, scale={"max": 9}, replicas=4)], None),
        (
            {"gpus": 3},
            [model(placement=TWO, scale={"max": 9}, standby=1, spares=2), model("b", placement=TWO)],
            ("limits.gpus", "3, with chat 6, b 2", "8"),
        ),
        ({"gpus": 3}, [model(replicas=9)], None),
        ({"replicas": 3}, [model(replicas=4)], ("limits.replicas", "3, with chat 4", "4")),
        ({"replicas": 3}, [model(scale={"max": 4, "shadow": True}, replicas=4)], ("limits.replicas", "", "4")),
        ({"gpus": 1}, [model(placement={"gpus": 1, "fraction": 0.4}, replicas=3)], ("limits.gpus", "", "1.2")),
        ({"replicas": 3}, [model(scale={"max": 4, "min": 0}, spares="auto")], None),
        ({"replicas": "x"}, [model(replicas=4)], None),
        ({"gpus": 1}, [model(placement=5, replicas=4), model("b", scale=7, replicas="x", placement=TWO)], None),
        (None, [model(replicas=9)], None),
    ],
)  # fmt: skip
def test_limits_below_the_sum_of_minimums_are_rejected(
    limits: object, models: list[object], found: tuple[str, str, str] | None
) -> None:
    [*conflicts_] = limit_conflicts({"limits": limits, "models": models})
    if found is None:
        assert conflicts_ == []
    else:
        [it] = conflicts_
        assert (it.path, it.allowed.split(",")[0]) == (found[0], f"at least {found[2]}")
        assert found[1] in it.found


def test_limits_are_read_from_the_cluster_file() -> None:
    raw = {"models": [model(replicas=3)], "limits": {"gpus": 8, "replicas": 3}}

    assert Cluster.model_validate(raw).limits.value() == Limits(8000, 3)
    assert ClusterLimits().value() == Limits()
    assert [each.path for each in conflicts({**raw, "limits": {"replicas": 2}})] == ["limits.replicas"]
