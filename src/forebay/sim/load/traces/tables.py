"""Traces that are tables: comma-separated, a header that names the columns, no quotes. Three kinds are known.

* Azure LLM inference traces (Splitwise, ISCA'24; DynamoLLM, HPCA'25): `TIMESTAMP,ContextTokens,GeneratedTokens`.
* Seconds from anywhere: `t_s,input_tokens,output_tokens`.
* The same with a `client`, as realised from ServeGen's statistics (arXiv 2505.09999): it becomes the tenant.

Columns may stand in any order, and others beside them. None of the three knows which prompts begin alike.
"""

from array import array
from collections.abc import Callable, Iterable
from datetime import UTC, datetime
from typing import Final, NamedTuple

from forebay.sim.load.columns import Columns
from forebay.sim.load.traces.lines import SPAN_S_MAX, TOKENS_MAX, BadLine, shown


def _clock_s(cell: bytes) -> float:
    """An ISO time in seconds since the epoch; one that names no zone is UTC. Raises ValueError."""
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
    """Where in a row things stand. `tenant`: -1 if there is none."""

    time: int
    prompt: int
    output: int
    tenant: int
    seconds: Callable[[bytes], float]


def layout(header: bytes) -> Layout | None:
    """What a header says; None if no kind of table that is known begins so."""
    names = [name.strip().lower() for name in header.removeprefix(b"\xef\xbb\xbf").split(b",")]
    for kind in _KINDS:
        if {kind.time, kind.prompt, kind.output} <= set(names):
            tenant = names.index(_CLIENT) if _CLIENT in names else -1
            return Layout(
                names.index(kind.time), names.index(kind.prompt), names.index(kind.output), tenant, kind.seconds
            )
    return None


def table(rows: Iterable[bytes], places: Layout) -> Columns:
    """Read the rows below a header. A time may be anything; the first request is at 0. Raises `BadLine`."""
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
            raise BadLine(f"found {shown(row)}; tokens may be 0 to {TOKENS_MAX:,}")
        if not (at >= 0 and -SPAN_S_MAX <= at - origin <= SPAN_S_MAX):
            raise BadLine(f"found {shown(row)}; times may not be below 0 nor span more than a year")
        at_s.append(at - origin)
        prompts.append(prompt or 1)
        outputs.append(output or 1)
        if tenant_at >= 0:
            name = names.get(client)
            if name is None:
                name = names[client] = client.decode("utf-8", "replace")
            tenants.append(name)
    return Columns(at_s, prompts, outputs, tenants=tenants).in_order().from_zero()
