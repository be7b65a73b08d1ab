"""Several gateways sharing a limit: despite crashes, partitions and stale reads they stay under it together."""

from collections.abc import Iterable, Sequence
from random import Random

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tests.core.tenancy.cluster import NIGHT, Cluster
from tests.examples import examples

from forebay.core.tenancy import (
    LEASE_S,
    Amounts,
    Asked,
    Demand,
    Lease,
    Quota,
    Tenant,
    allot,
    amounts,
)
from forebay.core.tenancy.quota import LACK_S, SLOTS
from forebay.core.tenancy.shares import UNLIMITED, equal_part

NOTHING = Amounts(0, 0, 0, 0)


def disturb(cluster: Cluster, rng: Random) -> None:
    """One of the things that happen to gateways. One that dies has just saved its counts."""
    up, down = sorted(cluster.up), sorted(set(cluster.names) - set(cluster.up))
    name = rng.choice(up or down)
    match rng.choice(("pass", "pass", "long", "look", "crash", "start", "midnight", "notice", "control")):
        case "pass":
            cluster.now += rng.uniform(0, 20)
        case "long":
            cluster.now += rng.choice((LEASE_S, SLOTS, LEASE_S + SLOTS + 1, 600.0))
        case "look":
            cluster.look(rng.sample(cluster.names, rng.randint(0, len(cluster.names))))
        case "crash" if name in up:
            cluster.save(name)
            cluster.kill(name)
        case "start" if down:
            cluster.start(rng.choice(down))
        case "midnight":
            cluster.day += 1
        case "notice" if name in up:
            cluster.up[name].begin_day(cluster.day, NIGHT)
        case "control":
            cluster.control_day = cluster.day


def press(cluster: Cluster, hot: Iterable[str], rng: Random) -> None:
    """Clients ask gateways for all they have, or for a bit; some answers end."""
    for name in sorted(cluster.up.keys() & set(hot)):
        stream, tokens = rng.random() < 0.5, rng.randint(0, rng.choice((12, 12, 150)))
        for _ in range(rng.choice((3, 400))):
            if not cluster.ask(name, tokens, stream):
                break
    for let in list(cluster.open):
        if rng.random() < 0.3:
            cluster.settle(let, rng.randint(0, let.tokens))


def some(names: Sequence[str], rng: Random) -> set[str]:
    """Mostly nobody, or one or more."""
    return set(rng.sample(names, rng.choice((0, 0, 1, rng.randint(0, len(names))))))


@settings(max_examples=examples(25), deadline=None)
@given(
    st.randoms(use_true_random=True),
    st.integers(1, 4),
    st.builds(Quota, st.integers(4, 40), st.integers(4, 200), st.integers(4, 12), st.integers(4, 900)),
)
def test_gateways_together_never_exceed_a_limit(rng: Random, gateways: int, limit: Quota) -> None:
    cluster = Cluster(limit, gateways)
    for _ in range(50):
        unheard, unread, late, hot = (some(cluster.names, rng) for _ in range(4))
        for _ in range(rng.choice((1, 4, 16))):
            cluster.round(unheard, unread, late)
            press(cluster, hot, rng)
        press(cluster, cluster.names, rng)
        assert cluster.is_within()
        disturb(cluster, rng)


@pytest.mark.parametrize("gateways", [1, 2, 4])
def test_tenant_hammering_every_gateway_gets_exactly_its_limit(gateways: int) -> None:
    cluster = Cluster(Quota(requests_per_min=60, tokens_per_min=600), gateways)
    most = 0
    for _ in range(300):
        cluster.round()
        for name in cluster.names:
            while cluster.ask(name, 10):
                pass
        most = max(most, cluster.used().tokens)

    assert 0.9 * 600 <= most <= 600


def test_quota_shares_follow_the_gateways_that_get_requests() -> None:
    cluster = Cluster(Quota(requests_per_min=100, tokens_per_day=1000), 4)

    def minutes(count: int, *names: str) -> list[int]:
        before = len(cluster.let)
        for _ in range(60 * count):
            cluster.round()
            for name in names:
                while cluster.ask(name, 1):
                    pass
        return [sum(let.gateway == name for let in cluster.let[before:]) for name in names]

    cluster.ask("g3", 1)
    assert minutes(2, "g0")[0] >= 150, "a floor of 7 stays with each of the other three"
    first, second = minutes(4, "g0", "g1")
    assert abs(first - second) <= 60
    minutes(10, "g0")
    assert cluster.used().day_tokens == 1000, "of the day nothing is kept back"


def test_gateways_without_control_keep_a_share_within_the_limit() -> None:
    cluster = Cluster(Quota(requests_per_min=100), 4)
    for _ in range(90):
        cluster.round()
        while cluster.ask("g0", 1):
            pass
    cluster.now += LEASE_S + SLOTS

    got = []
    for name in cluster.names:
        before = len(cluster.let)
        while cluster.ask(name, 1):
            pass
        got.append(len(cluster.let) - before)

    assert got[0] == 25
    assert min(got) >= 7
    assert cluster.used().requests <= 100


# --- requests larger than a share


@pytest.mark.parametrize("gateways", [2, 3, 4])
@pytest.mark.parametrize(
    ("limit", "tokens"),
    [
        (Quota(tokens_per_min=400), 257),
        (Quota(tokens_per_min=400), 400),
        (Quota(tokens_per_day=400), 257),
        (Quota(tokens_per_day=400), 400),
        (Quota(tokens_per_min=400, tokens_per_day=500), 400),
        (Quota(requests_per_min=1, tokens_per_min=400, streams_max=1), 400),
    ],
)
def test_request_larger_than_an_equal_share_is_admitted_soon(limit: Quota, tokens: int, gateways: int) -> None:
    cluster = Cluster(limit, gateways)
    let_in = []
    for _ in range(4):
        let_in += [name for name in cluster.names if cluster.ask(name, tokens, True)]
        cluster.round()

    assert let_in == ["g0"]
    assert cluster.is_within()


def test_clients_of_any_gateway_can_use_the_whole_limit() -> None:
    cluster = Cluster(Quota(tokens_per_min=400), 2)
    rng = Random(1)
    for _ in range(300):
        cluster.round()
        cluster.round()
        cluster.ask(rng.choice(cluster.names), 257)

    assert len(cluster.let) >= 8, "ten minutes have passed, and two requests do not fit into one"


@pytest.mark.parametrize("gateways", [2, 3])
def test_gateways_with_large_requests_are_served_in_turn(gateways: int) -> None:
    cluster = Cluster(Quota(tokens_per_min=1000), gateways)
    names = cluster.names[0], cluster.names[-1]
    served = dict.fromkeys(names, 0)
    for _ in range(600):
        cluster.round()
        for name in names:
            served[name] += cluster.ask(name, 600)

    assert min(served.values()) >= 4, "one fits into each minute, and both ask all the time"


@pytest.mark.parametrize("every_s", [3, 12, 15, 29])
def test_a_large_request_that_retries_is_admitted(every_s: int) -> None:
    cluster = Cluster(Quota(tokens_per_min=1000), 3)
    let_in = 0
    for second in range(600):
        cluster.round()
        if second % every_s == 0:
            let_in += cluster.ask("g1", 900)

    assert let_in >= 6


def test_the_gateway_that_can_admit_a_large_request_stays_the_same_while_asked() -> None:
    limit = Amounts(100, 400, 100, 4000)
    need = Amounts(1, 300, 0, 300)
    leases: dict[str, Lease] = {}

    def able(rounds: int, *asked: str) -> list[str]:
        """Who has room for it, round by round. It is never let in, so that all who are asked go on asking."""
        nonlocal leases
        found = []
        for _ in range(rounds):
            demands = {}
            for name in ("a", "b", "c"):
                share = leases[name].shares["t"] if leases else equal_part(limit, 3)
                wanted = Amounts(9, 3000, 0, 3000) if name in asked else NOTHING
                refused = {"t": need} if name in asked else {}
                demands[name] = Demand(0.0, 1, {"t": Asked(share, NOTHING, wanted)}, refused)
            leases = allot({"t": limit}, demands, leases, gateways=demands, day=1, now=0.0)
            found += [name for name, lease in leases.items() if lease.shares["t"].tokens >= need.tokens]
        return found

    assert able(10, "a", "b", "c") == ["a"] * 9
    assert able(10, "c", "b") == ["b"] * 9


@settings(max_examples=examples(60), deadline=None)
@given(
    st.randoms(use_true_random=True),
    st.integers(2, 4),
    st.builds(Quota, st.integers(4, 40), st.integers(4, 400), st.integers(4, 12), st.integers(4, 900)),
)
@example(rng=Random(1137), gateways=4, limit=Quota(4, 4, 4, 4))
@example(rng=Random(32377206), gateways=3, limit=Quota(6, 7, 5, 8))
@example(rng=Random(579608569), gateways=2, limit=Quota(6, 8, 5, 8))
def test_request_that_fits_the_remaining_limits_is_admitted_after_any_history(
    rng: Random, gateways: int, limit: Quota
) -> None:
    cluster = Cluster(limit, gateways)
    for _ in range(rng.choice((0, 1, 5, 20))):
        cluster.round()
        press(cluster, some(cluster.names, rng), rng)
    for let in list(cluster.open):
        cluster.settle(let, rng.randint(0, let.tokens))
    left = Amounts(*(most - used for most, used in zip(cluster.limit, cluster.used(), strict=True)))
    tokens = min(left.tokens, left.day_tokens)
    for _ in range(int(LACK_S) + 4):  # others may have asked for more just before, and may come again for it
        cluster.round()
        if left.requests < 1 or any([cluster.ask(name, tokens, True) for name in cluster.names]):
            break
    else:
        raise AssertionError(f"{tokens} tokens fit {left}, and were never let in")


def test_a_request_that_fits_at_some_gateway_takes_nothing_from_the_others() -> None:
    share = Amounts(50, 50, 50, 50)
    limit = Amounts(100, 100, 100, UNLIMITED)
    before = {name: Lease(0.0, 0.0, 1, {"t": share}, {"t": share}) for name in ("a", "b")}

    def tokens(need: Amounts, *, heard: Iterable[str] = ("a", "b")) -> list[int]:
        """The shares, where `a` has used 45 and both could use all."""
        asked = {"a": Asked(share, Amounts(1, 45, 0, 45), limit), "b": Asked(share, NOTHING, limit)}
        demands = {name: Demand(1.0, 1, {"t": asked[name]}, {"t": need}) for name in heard}
        leases = allot({"t": limit}, demands, before, gateways=("a", "b"), day=1, now=1.0)
        assert leases["a"].left == leases["b"].left
        assert leases["a"].left["t"] == Amounts(99, 55, 100, UNLIMITED) or "b" not in heard
        return [leases[name].shares["t"].tokens for name in ("a", "b")]

    assert tokens(Amounts(1, 50, 0, 50)) == [50, 50], "b has room for it"
    assert tokens(Amounts(1, 51, 0, 51)) == [47, 50], "b lacks least, and a goes down to what it used and some more"
    assert tokens(Amounts(1, 56, 0, 56)) == [50, 50], "there is not so much left"
    assert tokens(Amounts(1, 51, 0, 51), heard=["a"]) == [50, 50], "what the silent hold is not there to be given"


def test_silent_gateway_keeps_its_minute_share_until_its_lease_expires_and_its_day_share() -> None:
    limit = Amounts(100, 1000, 40, 10_000)
    share = Amounts(80, 800, 30, 9000)
    before = {"g0": Lease(0.0, 500.0, 1, {"t": share}, {"t": share})}
    want = Demand(7.0, 1, {"t": Asked(Amounts(20, 200, 10, 1000), NOTHING, limit)})

    def shared(now: float) -> tuple[Amounts, Amounts]:
        leases = allot({"t": limit}, {"g1": want}, before, gateways=("g0", "g1"), day=1, now=now)
        assert leases["g1"].asked_at == 7.0
        return leases["g0"].shares["t"], leases["g1"].shares["t"]

    assert shared(500.0 + LEASE_S + SLOTS) == (share, Amounts(20, 200, 10, 1000))
    assert shared(501.0 + LEASE_S + SLOTS) == (Amounts(50, 500, 30, 9000), Amounts(50, 500, 10, 1000))


@pytest.mark.parametrize("heard", [False, True])
def test_a_gateway_not_yet_on_the_new_day_may_begin_it_with_an_equal_share(heard: bool) -> None:
    limit, share = Amounts(4, 4, 4, 1000), Amounts(2, 2, 2, 10)
    before = {"g0": Lease(0.0, 0.0, 1, {"t": share}, {"t": share})}
    want = Asked(Amounts(2, 2, 2, 500), NOTHING, Amounts(9, 9, 9, 9000))
    demands = {"g1": Demand(0.0, 2, {"t": want})}
    if heard:
        demands["g0"] = Demand(0.0, 1, {"t": Asked(share, NOTHING, NOTHING)})
    after = allot({"t": limit}, demands, before, gateways=("g0", "g1"), day=2, now=0.0)

    assert [after[name].shares["t"].day_tokens for name in ("g0", "g1")] == [500, 500]
    assert after["g0"].day == 2


def test_a_gateway_killed_without_notice_repeats_at_most_what_it_had_not_saved() -> None:
    cluster = Cluster(Quota(requests_per_min=40), 2)
    for _ in range(3):
        cluster.round()
    cluster.save("g0")
    while cluster.ask("g0", 1):
        pass
    share = len(cluster.let)
    cluster.kill("g0")
    cluster.start("g0")
    for _ in range(30):
        cluster.round()
        for name in cluster.names:
            while cluster.ask(name, 1):
                pass

    assert cluster.used().requests <= 40 + share


def test_new_tenants_and_gateways_begin_with_equal_shares_of_existing_limits() -> None:
    limits = {"free": amounts(Quota()), "t": Amounts(10, UNLIMITED, 4, UNLIMITED)}
    leases = allot(limits, {}, {}, gateways=("b", "a"), day=3, now=9.0)

    assert list(leases) == ["a", "b"]
    assert leases["a"] == leases["b"]
    assert leases["a"].shares == {
        "free": Amounts(UNLIMITED, UNLIMITED, UNLIMITED, UNLIMITED),
        "t": Amounts(5, UNLIMITED, 2, UNLIMITED),
    }
    older = Demand(1.0, 3, {})
    assert allot(limits, {"a": older}, {}, gateways=("a", "b"), day=3, now=9.0)["a"].shares == leases["a"].shares


def test_a_lowered_limit_grants_nothing_until_enough_was_returned() -> None:
    share = Amounts(50, 50, 50, 50)
    before = {name: Lease(0.0, 0.0, 1, {"t": share}, {"t": share}) for name in ("a", "b")}
    demands = {"a": Demand(1.0, 1, {"t": Asked(share, NOTHING, share)})}
    leases = allot({"t": Amounts(10, 10, 10, 10)}, demands, before, gateways=("a", "b"), day=1, now=1.0)

    assert leases["a"].shares["t"] == Amounts(0, 0, 0, 0)
    assert leases["a"].held["t"] == share


@pytest.mark.parametrize("restart", [False, True])
def test_removed_limit_ends_at_every_gateway_and_a_restored_one_holds(restart: bool) -> None:
    cluster = Cluster(Quota(requests_per_min=20, streams_max=4), gateways=2)
    for _ in range(3):
        cluster.round()
    for quota, most in (
        (Quota(), 60),
        (Quota(requests_per_min=20, streams_max=4), 20),
        (Quota(requests_per_min=40), 40),
    ):
        cluster.now += SLOTS
        cluster.limit, cluster.tenant = amounts(quota), Tenant("t", limits=quota)
        cluster.let.clear()
        cluster.look(cluster.names)
        for name in cluster.names:
            if restart:
                cluster.start(name)
            else:
                cluster.up[name].configure([cluster.tenant])
        for _ in range(30):
            cluster.round()
            for name in cluster.names:
                cluster.ask(name, 1)
        assert len(cluster.let) == most


counts = st.integers(0, 200)
rows = st.tuples(counts, counts, counts, counts, st.booleans(), counts)


@given(st.integers(0, 300), st.lists(rows, min_size=1, max_size=5))
def test_shares_grow_only_from_unheld_quota(
    limit: int, given_rows: list[tuple[int, int, int, int, bool, int]]
) -> None:
    names = [f"g{n}" for n in range(len(given_rows))]
    before, demands = {}, {}
    for name, (share, goes_by, used, wanted, heard, need) in zip(names, given_rows, strict=True):
        before[name] = Lease(0.0, 0.0, 1, {"t": Amounts(*[share] * 4)}, {"t": Amounts(*[max(share, goes_by)] * 4)})
        if heard:
            asked = Asked(*(Amounts(*[n] * 4) for n in (goes_by, used, wanted)))
            demands[name] = Demand(0.0, 1, {"t": asked}, {"t": Amounts(*[need] * 4)})
    after = allot({"t": Amounts(*[limit] * 4)}, demands, before, gateways=names, day=1, now=0.0)

    for column in range(4):
        held = {n: max(r[0], r[1], r[2] if r[4] else 0) for n, r in zip(names, given_rows, strict=True)}
        now_held = {name: after[name].held["t"][column] for name in names}
        assert sum(now_held.values()) <= max(limit, sum(held.values()))
        for name in names:
            assert after[name].shares["t"][column] <= now_held[name]
            assert now_held[name] >= held[name]
