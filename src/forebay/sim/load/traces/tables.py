"""Traces as tables: comma-separated, with a header that names the columns, without quotes. Three kinds are known.

* Azure LLM inference traces (Splitwise, ISCA'24; DynamoLLM, HPCA'25): `TIMESTAMP,ContextTokens,GeneratedTokens`.

* Generic, in seconds: `t_s,input_tokens,output_tokens`.

* The same with a `client`, as realised from ServeGen's statistics (arXiv 2505.09999): it becomes the tenant.

Columns may be in any order, with others among them. None of the three has information about shared prefixes.
"""

from array import array
from collections.abc import Callable, Iterable
from datetime import UTC, datetime
from typing import Final, NamedTuple

from forebay.sim.load.columns import Columns
from forebay.sim.load.traces.lines import SPAN_S_MAX, TOKENS_MAX, BadLine, shown


def _clock_s(cell: bytes) -> float:
    """An ISO time in seconds since the epoch; UTC if it has no zone. Raises ValueError."""
    at = datetime.fromisoformat(cell.decode("ascii"))
    return (at if at.tzinfo is not None else at.replace(tzinfo=UTC)).timestamp()


class _Kind(NamedTuple):
    time: bytes
    prompt: bytes
    output: bytes
    seconds: Callable[[bytes], float]


_KINDS: Final = (
    _Kind(b"timestamp", b"contexttokens", b"generatedtokens", _clock_s),
    _Kind(b"t_s", b"input_tokens", b"output_tokens", float),
)
_CLIENT: Final = b"client"


class Layout(NamedTuple):
    """Column indexes. `tenant`: -1 if there is none."""

    time: int
    prompt: int
    output: int
    tenant: int
    seconds: Callable[[bytes], float]


def layout(header: bytes) -> Layout | None:
    """The layout of a header; None if it is not of a known kind."""
    names = [name.strip().lower() for name in header.removeprefix(b"\xef\xbb\xbf").split(b",")]
    for kind in _KINDS:
        if {kind.time, kind.prompt, kind.output} <= set(names):
            tenant = names.index(_CLIENT) if _CLIENT in names else -1
            return Layout(
                names.index(kind.time), names.index(kind.prompt), names.index(kind.output), tenant, kind.seconds
            )
    return None


def table(rows: Iterable[bytes], places: Layout) -> Columns:
    """Read the rows below a header. Times may have any origin; the first request is at 0. Raises `BadLine`."""
    at_s, prompts, outputs = array("d"), array("i"), array("i")
    tenants: list[str] = []
    names: dict[bytes, str] = {}
    time_at, prompt_at, output_at, tenant_at, seconds = places
    origin: float | None = None
    for row in rows:
        cells = row.split(b",")
        try:
            at, prompt, output = seconds(cells[time_at]), int(cells[prompt_at]), int(cells[output_at])
            client = cells[tenant_at] if tenant_at >= 0 else b""
        except (ValueError, IndexError, OverflowError):
            raise BadLine(f"found {shown(row)}; a time and two whole numbers of tokens were expected") from None
        if origin is None:
            origin = at
        if not 0 <= prompt <= TOKENS_MAX or not 0 <= output <= TOKENS_MAX:
            raise BadLine(f"found {shown(row)}; tokens must be 0 to {TOKENS_MAX:,}")
        if not (at >= 0 and -SPAN_S_MAX <= at - origin <= SPAN_S_MAX):
            raise BadLine(f"found {shown(row)}; times must not be negative nor span more than a year")
        at_s.append(at - origin)
        prompts.append(prompt or 1)
        outputs.append(output or 1)
        if tenant_at >= 0:
            name = names.get(client)
            if name is None:
                name = names[client] = client.decode("utf-8", "replace")
            tenants.append(name)
    return Columns(at_s, prompts, outputs, tenants=tenants).in_order().from_zero()
