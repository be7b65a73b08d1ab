"""Sources of the command line's settings: the cluster file, `--set`, and FOREBAY_… environment variables."""

import os
import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.console import Console

    from forebay.core.cluster import Cluster

FILE = "forebay.yaml"
HOME = ".forebay"
GATEWAY_URL = "http://127.0.0.1:8080"
ADMIN_URL = "http://127.0.0.1:8081"
PREFIX = "FOREBAY_"
VARIABLES = {
    "FOREBAY_HOME": f"folder for models, caches and run-time state; default: `{HOME}` in the current folder",
    "FOREBAY_URL": f"base URL that `chat` and `bench` talk to; default: `{GATEWAY_URL}`",
    "FOREBAY_ADMIN_URL": "admin API that commands talk to; default: that of the cluster of `-f` or "
    f"./{FILE}, else of the one running in `FOREBAY_HOME`, else `{ADMIN_URL}`",
    "FOREBAY_ADMIN_TOKEN": "API key for the admin API, for clusters with `admin.auth: keys`",
    "FOREBAY_API_KEY": "bearer token that `chat`, `bench` and `conformance` send, for servers that require one",
    "FOREBAY_CA": "PEM file of the CA to trust for https (`chat`, `bench`, `conformance`); default: the system's CAs",
    "FOREBAY_<KEY>__<KEY>": "a setting of the cluster file, for example `FOREBAY_GATEWAY__PORT=9000` or "
    "`FOREBAY_MODELS__0__REPLICAS=2`; `--set` takes precedence",
}
"""The environment variables that the command line reads."""

FILE_BYTES_MAX = 1_000_000
PIPE_COLUMNS = 160
WRONG_USAGE, NOT_REACHED, INTERRUPTED = 2, 3, 130
"""Exit codes besides 0 (success) and 1 (failure)."""


class UserError(Exception):
    """An error that the user can fix; the text says how. `exit_code` tells scripts what kind it is."""

    def __init__(self, text: str, exit_code: int = 1) -> None:
        self.exit_code = exit_code
        super().__init__(text)


@dataclass(frozen=True, slots=True)
class FileText:
    """A cluster file as read. `name` is for messages."""

    name: str
    text: bytes
    is_demo: bool = False


def screen(stderr: bool = False) -> "Console":
    """The console for results, or on standard error for notes. A pipe gets a fixed width."""
    from rich.console import Console

    stream = sys.stderr if stderr else sys.stdout
    return Console(stderr=stderr, highlight=False, width=None if stream.isatty() else PIPE_COLUMNS)


def is_text(argument: str) -> bool:
    """Whether an argument, a path or a variable is UTF-8."""
    return not any("\udc80" <= each <= "\udcff" for each in argument)


def home() -> Path:
    """FOREBAY_HOME, absolute. Raises `UserError` unless it is UTF-8, as documents name it."""
    path = Path(os.environ.get("FOREBAY_HOME") or HOME).absolute()
    if not is_text(str(path)):
        shown = os.fsencode(path).decode(errors="backslashreplace")
        raise UserError(f"FOREBAY_HOME: {shown} is not UTF-8; set it to another folder.")
    return path


def gateway_url() -> str:
    """Base URL of the gateway, without a trailing slash."""
    return (os.environ.get("FOREBAY_URL") or GATEWAY_URL).rstrip("/")


def demo_file() -> FileText:
    """The cluster file in the package."""
    return FileText(f"demo/{FILE}", (resources.files("forebay.cli") / "demo" / FILE).read_bytes(), is_demo=True)


def read_file(path: Path | None) -> FileText:
    """The cluster file at `path`; without one ./forebay.yaml, else the demo. Raises `UserError`."""
    if path is None:
        if not Path(FILE).exists():
            return demo_file()
        path = Path(FILE)
    try:
        with path.open("rb") as file:
            return FileText(str(path), file.read(FILE_BYTES_MAX + 1))
    except FileNotFoundError:
        raise UserError(f"{path}: no such file.") from None
    except OSError as error:
        raise UserError(f"{path}: cannot be read ({error.strerror}).") from None


def variable_overrides(environ: Mapping[str, str]) -> dict[str, str]:
    """`FOREBAY_GATEWAY__PORT=1` as `{"gateway.port": "1"}`; a number as a key is an index."""
    from forebay.core.cluster import Cluster

    top = set(Cluster.model_fields)
    overrides = {}
    for name in sorted(environ):
        if not name.startswith(PREFIX):
            continue
        first, *rest = name.removeprefix(PREFIX).lower().split("__")
        if rest or first in top:
            steps = [f"[{step}]" if step.isdigit() else f".{step}" for step in (first, *rest)]
            overrides["".join(steps).lstrip(".")] = environ[name]
    return overrides


def set_overrides(assignments: Iterable[str]) -> dict[str, str]:
    """Parse the `PATH=VALUE` of `--set`. Raises `UserError`."""
    overrides = {}
    for assignment in assignments:
        path, equals, value = assignment.partition("=")
        if not equals or not path.strip():
            raise UserError(
                f"--set {assignment!r}: expected PATH=VALUE, for example --set gateway.port=9000", WRONG_USAGE
            )
        overrides[path.strip()] = value
    return overrides


def load_cluster(
    file: FileText,
    assignments: Iterable[str],
    environ: Mapping[str, str],
    *,
    to_run: bool = False,
    otherwise: str = "",
) -> "Cluster":
    """The cluster of a file, with environment variables and `--set` applied. Raises `UserError` with all problems."""
    overrides = {**variable_overrides(environ), **set_overrides(assignments)}
    return parse_cluster(file, overrides, to_run=to_run, otherwise=otherwise)


def parse_cluster(
    file: FileText, overrides: Mapping[str, str], *, to_run: bool = False, otherwise: str = ""
) -> "Cluster":
    """Parse a cluster file. `to_run`: the certificate that it names must be valid too.

    Raises `UserError` with all problems; `otherwise` states what was not done because of them.
    """
    from forebay.net import tls
    from forebay.wire import clusterfile

    try:
        return clusterfile.load(file.text, file.name, overrides, look=tls.conflicts if to_run else lambda _: ())
    except clusterfile.ClusterFileError as error:
        raise UserError(error.listing(otherwise or f"nothing was {'started' if to_run else 'done'}")) from None
