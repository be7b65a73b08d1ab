"""How commands find the admin API of a cluster: one rule for all of them."""

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
"""Text for the documentation."""


class Holder(msgspec.Struct, frozen=True):
    """Content of a cluster's lock file: the process that runs it, and its admin API."""

    process: Identity
    since: float
    admin: str = ""


class Address(NamedTuple):
    """A base URL without a trailing slash, and where it comes from, for messages."""

    url: str
    origin: str


def admin_address(url: str | None, file: Path | None) -> Address:
    """`--url`; else FOREBAY_ADMIN_URL; else the cluster of a file, from `-f` or ./forebay.yaml: where it runs here,
    else the address in the file; else the only cluster running here; else the default.

    Raises `UserError` if a file given by the user is invalid, or several clusters run here.
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
        raise UserError("\n".join(["Several clusters run here. Choose one:", *listed]), settings.WRONG_USAGE)
    wrong = "" if source.is_demo else f", as {source.name} is invalid: `forebay config check`"
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
    """The admin API's URL on the cluster's own machine."""
    host, port = cluster.admin.host, cluster.admin.port
    try:
        address = ip_address(host)
    except ValueError:
        return f"http://{host}:{port}"
    if address.version == 4:
        return f"http://{'127.0.0.1' if address.is_unspecified else address}:{port}"
    return f"http://[{'::1' if address.is_unspecified else address}]:{port}"


def _cluster(source: settings.FileText, *, tolerant: bool) -> Cluster | None:
    """None: there is no file. An invalid default file must not prevent inspecting what runs."""
    if source.is_demo:
        return None
    try:
        return settings.load_cluster(source, [], os.environ, otherwise="no request was sent")
    except UserError:
        if tolerant:
            return None
        raise
