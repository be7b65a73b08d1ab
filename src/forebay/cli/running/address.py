"""Where the admin API of the cluster that is meant answers: one rule, for all commands."""

import os
from ipaddress import ip_address
from pathlib import Path
from typing import Final, NamedTuple

import msgspec

from forebay.cli import settings
from forebay.cli.settings import UserError
from forebay.core.cluster import Cluster
from forebay.providers.processes import Identity, is_alive
from forebay.wire.documents import UNREADABLE

VARIABLE: Final = "FOREBAY_ADMIN_URL"
RULE: Final = f"""\
Commands that talk to a running cluster use the first of these admin API addresses that is available:

1. `--url`;
2. `{VARIABLE}`;
3. the cluster of the file given with `-f`, or of `./{settings.FILE}`: where it was started below `FOREBAY_HOME`, even
   on another port by `--set`; if it does not run there, the address in the file;
4. the only cluster running below `FOREBAY_HOME`, such as one of `forebay serve`;
5. `{settings.ADMIN_URL}`.

`forebay registry`, `history`, `keys`, `explain`, `usage` and `audit` open the store and the files of the cluster
directly, even while nothing runs. Given an address or a key they use the admin API as the others do: with
`--url` or `--token-file`, and, unless `-f` (or `--folder`) is given too, with `{VARIABLE}` or
`FOREBAY_ADMIN_TOKEN`.
"""
"""For people."""


class Holder(msgspec.Struct, frozen=True):
    """Content of the lock file of a cluster: who runs it, and where its admin API answers."""

    process: Identity
    since: float
    admin: str = ""


class Address(NamedTuple):
    """A base URL without a slash at the end, and who says so, as messages put it."""

    url: str
    origin: str


def admin_address(url: str | None, file: Path | None) -> Address:
    """What `--url` says; else FOREBAY_ADMIN_URL; else the cluster of a file, of `-f` or ./forebay.yaml: where it was
    started, or, if it does not run here, where it would be; else the one that runs here; else the default.

    Raises `UserError` if a file that was named is wrong, or several run here.
    """
    said = url or os.environ.get(VARIABLE)
    if said:
        return Address(said.rstrip("/"), "--url" if url else VARIABLE)
    there, source = running(settings.home()), settings.read_file(file)
    cluster = _cluster(source, tolerant=file is None)
    if cluster is not None:
        return Address(there.get(cluster.name) or admin_url(cluster), source.name)
    if len(there) > 1:
        listed = [f"  {name}: --url {each}" for name, each in there.items()]
        raise UserError(
            "\n".join(["Several clusters run here. Say which one is meant:", *listed]), settings.WRONG_USAGE
        )
    wrong = "" if source.is_demo else f", as {source.name} is wrong: `forebay config check`"
    return next(
        (Address(each, name) for name, each in there.items()), Address(settings.ADMIN_URL, f"the default{wrong}")
    )


def running(home: Path) -> dict[str, str]:
    """The admin APIs of the clusters that run below a FOREBAY_HOME, by name."""
    found = {}
    for path in sorted((home / "run").glob("*/lock")):
        try:
            holder = msgspec.json.decode(path.read_bytes(), type=Holder)
        except (OSError, *UNREADABLE):
            continue
        if holder.admin and is_alive(holder.process):
            found[path.parent.name] = holder.admin
    return found


def admin_url(cluster: Cluster) -> str:
    """Where the admin API of a cluster answers on its own machine."""
    host, port = cluster.admin.host, cluster.admin.port
    try:
        address = ip_address(host)
    except ValueError:
        return f"http://{host}:{port}"
    if address.version == 4:
        return f"http://{'127.0.0.1' if address.is_unspecified else address}:{port}"
    return f"http://[{'::1' if address.is_unspecified else address}]:{port}"


def _cluster(source: settings.FileText, *, tolerant: bool) -> Cluster | None:
    """None: there is no file. What is wrong with one that nobody has named keeps nobody from looking at what runs."""
    if source.is_demo:
        return None
    try:
        return settings.load_cluster(source, [], os.environ, otherwise="nobody was asked")
    except UserError:
        if tolerant:
            return None
        raise
