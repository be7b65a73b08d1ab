"""Authentication of the admin API: by the key file, and by the account that the kernel names."""

import os
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from forebay.control.api.access import ANONYMOUS, AccountAuthenticator, Credentials, KeyAuthenticator, account, owner
from forebay.core.errors import Code, Refusal
from forebay.core.registry.approval import Role
from forebay.core.tenancy import ENTROPY_BYTES, mint
from forebay.core.tenancy.roles import Caller
from forebay.registry.keys import change_keys

KEY, RECORD = mint("ada", bytes(range(ENTROPY_BYTES)), 100.0, role="operator")
SENT = f"Bearer {KEY}".encode()
HEAD = "  sl  local_address rem_address   st tx_queue rx_queue tr tm->when retrnsmt   uid  timeout inode\n"
PEER, SERVER = ("127.0.0.1", 0xAFA0), ("127.0.0.1", 0x1F91)
LINE = " 1: 0100007F:AFA0 0100007F:1F91 {state} 0:0 00:0 00000000 {user} 0 {inode} 2 0 20 0 0 10 -1\n"


def credentials(presented: bytes | None = None, read_only: bool = False) -> Credentials:
    return Credentials(presented, PEER, SERVER, read_only)


def table(user: int, state: str = "01", inode: int = 7) -> str:
    return HEAD + LINE.format(state=state, user=user, inode=inode)


def refused(authenticator: KeyAuthenticator, presented: bytes | None) -> Code:
    with pytest.raises(Refusal) as raised:
        authenticator.admit(credentials(presented))
    return raised.value.code


def test_key_file_changes_take_effect_immediately(tmp_path: Path) -> None:
    path = tmp_path / "admin-keys.json"
    authenticator = KeyAuthenticator(path, lambda: 200.0)

    assert refused(authenticator, SENT) is Code.UNAUTHORIZED
    change_keys(path, lambda keys: ((*keys, RECORD), None))
    assert authenticator.admit(credentials(SENT)) == Caller("ada", Role.OPERATOR)
    assert authenticator.admit(credentials(SENT, read_only=True)) == Caller("ada", Role.OPERATOR)
    change_keys(path, lambda keys: ((), None))
    assert refused(authenticator, SENT) is Code.UNAUTHORIZED
    change_keys(path, lambda keys: ((RECORD,), None))
    assert authenticator.admit(credentials(SENT)).name == "ada"
    path.unlink()
    assert refused(authenticator, SENT) is Code.UNAUTHORIZED


def test_an_unreadable_key_file_admits_no_caller(tmp_path: Path) -> None:
    path = tmp_path / "admin-keys.json"
    change_keys(path, lambda keys: ((RECORD,), None))
    authenticator, good = KeyAuthenticator(path, lambda: 200.0), path.read_bytes()
    assert authenticator.admit(credentials(SENT)).name == "ada"
    path.write_bytes(b"{")

    assert refused(authenticator, SENT) is Code.INTERNAL
    assert refused(authenticator, SENT) is Code.INTERNAL
    path.write_bytes(good)
    assert authenticator.admit(credentials(SENT)).name == "ada"


@pytest.mark.parametrize(
    ("user", "role"),
    [(0, Role.ADMIN), (os.geteuid(), Role.ADMIN), (4_000_000_000, Role.VIEWER)],
)
def test_account_auth_makes_owner_and_root_admin_and_others_viewers(user: int, role: Role) -> None:
    assert AccountAuthenticator(lambda credentials: table(user)).admit(credentials()) == Caller(account(user), role)


@pytest.mark.parametrize(
    ("host", "may"),
    [
        ("127.0.0.1", True),
        ("localhost", True),
        ("::1", True),
        ("", True),
        ("evil.example", False),
        ("10.0.0.1", False),
    ],
)
@pytest.mark.parametrize("read_only", [True, False])
def test_account_auth_rejects_hosts_other_than_loopback(host: str, may: bool, read_only: bool) -> None:
    asked = Credentials(None, PEER, SERVER, read_only, host)
    authenticator = AccountAuthenticator(lambda credentials: table(0))
    if may:
        assert authenticator.admit(asked).role is (Role.VIEWER if read_only else Role.ADMIN)
    else:
        with pytest.raises(Refusal, match=r"admin\.auth"):
            authenticator.admit(asked)


def test_reads_need_no_authentication_by_account() -> None:
    def fail(credentials: Credentials) -> str:
        raise AssertionError

    assert AccountAuthenticator(fail).admit(credentials(read_only=True)) == ANONYMOUS


@pytest.mark.parametrize(
    "shown",
    [
        "",
        HEAD,
        table(0, state="05"),  # closed by him, so it belongs to nobody: the kernel says root
        table(0, inode=0),
        table(0).replace("AFA0", "AFA1"),
        table(0).replace("1F91", "1F90"),
        HEAD + LINE.replace("0100007F:AFA0 0100007F:1F91", "0100007F:1F91 0100007F:AFA0").format(
            state="01", user=0, inode=7
        ),  # the server's own end
    ],
)  # fmt: skip
def test_connection_without_known_owner_is_anonymous(shown: str) -> None:
    assert AccountAuthenticator(lambda credentials: shown).admit(credentials()) == ANONYMOUS


def test_a_closing_connection_is_anonymous() -> None:
    shown: Iterator[str] = iter([table(0), table(0, state="05")])

    assert AccountAuthenticator(lambda credentials: next(shown)).admit(credentials()) == ANONYMOUS


@pytest.mark.parametrize(
    ("peer", "server"), [(None, SERVER), (PEER, None), (("testclient", 1), SERVER), (("::1", 1), SERVER)]
)
def test_non_ip_endpoints_have_no_owner(peer: tuple[str, int] | None, server: tuple[str, int] | None) -> None:
    assert owner(table(0), Credentials(None, peer, server, False)) is None


@pytest.mark.parametrize(("family", "host"), [(socket.AF_INET, "127.0.0.1"), (socket.AF_INET6, "::1")])
def test_owner_of_a_real_connection_is_found(family: socket.AddressFamily, host: str) -> None:
    with socket.socket(family) as listener:
        try:
            listener.bind((host, 0))
        except OSError:
            pytest.skip(f"{host} is not there")
        listener.listen()
        server = listener.getsockname()[:2]
        with socket.create_connection(server) as client:
            doors = Credentials(None, client.getsockname()[:2], server, read_only=False)
            assert AccountAuthenticator().admit(doors) == Caller(account(os.geteuid()), Role.ADMIN)
        assert AccountAuthenticator().admit(doors) == ANONYMOUS
