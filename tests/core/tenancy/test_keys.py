"""API keys: only the stored digest of a key authenticates it."""

import math
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from forebay.core.admission import Band
from forebay.core.errors import Code
from forebay.core.tenancy import (
    ANONYMOUS,
    ENTROPY_BYTES,
    Denied,
    Directory,
    Granted,
    KeyRecord,
    Tenant,
    authorise,
    mint,
)

TEAM = Tenant("team")
ENTROPY = bytes(range(ENTROPY_BYTES))
KEY, RECORD = mint("team", ENTROPY, now=100.0)
entropies = st.binary(min_size=ENTROPY_BYTES, max_size=ENTROPY_BYTES)


def ask(presented: bytes | None, *records: KeyRecord, now: float = 200.0) -> Granted | Denied:
    return authorise(Directory([TEAM], records or (RECORD,)), presented, now)


def test_a_key_has_an_id_and_a_secret_and_only_its_digest_is_kept() -> None:
    assert KEY.startswith("fb-aaaqeaye-")
    assert (RECORD.id, RECORD.tenant, RECORD.created, RECORD.expires, RECORD.revoked) == (
        KEY[3:11],
        "team",
        100.0,
        None,
        None,
    )
    assert KEY[12:] not in str(RECORD)
    assert len(KEY[12:]) * 5 >= 256


def test_minting_a_key_requires_full_entropy() -> None:
    with pytest.raises(ValueError, match="random bytes"):
        mint("team", ENTROPY[1:], now=0.0)


@pytest.mark.parametrize("before", [b"", b"Bearer ", b"bearer ", b"BEARER   "])
def test_valid_key_is_accepted_with_and_without_bearer_prefix(before: bytes) -> None:
    assert ask(before + KEY.encode()) == Granted(TEAM, math.inf, RECORD.id)


@pytest.mark.parametrize(
    "presented",
    [
        b"x",
        b"Bearer",
        b"Bearer ",
        b"Basic " + KEY.encode(),
        KEY.upper().encode(),
        KEY.encode()[:-1],
        KEY.encode() + b"a",
        KEY.encode() + b"\n",
        b"fb-" + b"a" * 8 + KEY[11:].encode(),
        b"Bearer " + b" " * 100 + KEY.encode(),
        b"\xff" * 30_000,
    ],
)
def test_malformed_or_altered_key_is_invalid(presented: bytes) -> None:
    assert ask(presented) == Denied(Code.UNAUTHORIZED, "The API key is not valid.")


@pytest.mark.parametrize("presented", [None, b""])
def test_a_request_without_a_key_is_answered_with_how_to_send_one(presented: bytes | None) -> None:
    refused = ask(presented)

    assert isinstance(refused, Denied)
    assert refused.code is Code.UNAUTHORIZED
    assert all(name in refused.text for name in ("Authorization: Bearer", "x-api-key", "api-key"))


@given(entropies, st.integers(0, 51), st.sampled_from("abcdefghijklmnopqrstuvwxyz234567"))
def test_key_with_any_changed_letter_is_invalid(entropy: bytes, place: int, letter: str) -> None:
    key, record = mint("team", entropy, now=0.0)
    changed = key[: 12 + place] + letter + key[13 + place :]

    assert isinstance(ask(changed.encode(), record), Granted) == (changed == key)


@given(entropies, entropies)
def test_key_does_not_authenticate_another_id(one: bytes, other: bytes) -> None:
    key, record = mint("team", one, now=0.0)
    forged = replace(mint("team", other, now=0.0)[1], id=record.id)

    assert isinstance(ask(key.encode(), forged), Granted) == (one[5:] == other[5:] and one[:5] == other[:5])


def test_an_expired_key_is_named_as_such_only_to_its_holder() -> None:
    record = replace(RECORD, expires=300.0)
    other = KEY[:12] + "a" * 52

    assert ask(KEY.encode(), record, now=299.0) == Granted(TEAM, 300.0, record.id)
    assert ask(KEY.encode(), record, now=300.0) == Denied(Code.UNAUTHORIZED, "The API key has expired.")
    assert ask(other.encode(), record, now=300.0) == Denied(Code.UNAUTHORIZED, "The API key is not valid.")


def test_revoked_key_is_invalid_regardless_of_its_other_state() -> None:
    record = replace(RECORD, expires=150.0, revoked=120.0)

    assert ask(KEY.encode(), record) == Denied(Code.UNAUTHORIZED, "The API key was revoked.")


def test_key_of_a_removed_tenant_is_invalid() -> None:
    refused = ask(KEY.encode(), replace(RECORD, tenant="old-team"))

    assert isinstance(refused, Denied)
    assert refused.code is Code.UNAUTHORIZED
    assert "`old-team`" in refused.text


@pytest.mark.parametrize(
    ("models", "allowed"),
    [
        (("*",), ["chat", "chat-large", "embed"]),
        (("chat",), ["chat"]),
        (("chat*",), ["chat", "chat-large"]),
        (("embed", "*-large"), ["chat-large", "embed"]),
        ((), []),
    ],
)
def test_allow_list_matches_names_and_patterns(models: tuple[str, ...], allowed: list[str]) -> None:
    tenant = Tenant("team", models)

    assert [model for model in ("chat", "chat-large", "embed") if tenant.may_use(model)] == allowed


def test_requested_band_is_limited_to_the_tenants_maximum() -> None:
    tenant = Tenant("team", band=Band.BATCH, band_max=Band.DEFAULT)

    assert tenant.band_of(None) is Band.BATCH
    assert tenant.band_of(Band.BATCH) is Band.BATCH
    assert tenant.band_of(Band.DEFAULT) is Band.DEFAULT
    assert tenant.band_of(Band.SYSTEM) is Band.DEFAULT
    assert ANONYMOUS.band_of(Band.SYSTEM) is Band.INTERACTIVE
