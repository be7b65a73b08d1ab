"""The section `control` of the cluster file: the number of controllers, and leases."""

from collections.abc import Iterator, Mapping
from typing import Annotated, Any, Literal

from pydantic import Field

from forebay.core.errors import Conflict
from forebay.core.section import Section


class ControlSettings(Section):
    """The control plane."""

    controllers: Literal["one", "several"] = "one"
    """`several`: a second `forebay up` of the cluster waits, and takes over when the first one fails or is stopped.
    This requires PostgreSQL as the `store`, and a separate `admin.port` for each."""
    lease_s: Annotated[float, Field(ge=2, le=300)] = 8.0
    """With several controllers, the leader renews a lease of this length; another one takes over when it expires,
    seconds."""
    replica_lease_s: Annotated[float, Field(ge=0, le=3600)] = 30.0
    """A replica that neither control nor any gateway has polled for this long stops itself, as it is cut off and has
    been replaced. Seconds; 0: never."""


def control_conflicts(raw: Mapping[str, Any]) -> Iterator[Conflict]:
    """Conflicts in a cluster given as unvalidated data. Parts of a wrong type are skipped."""
    control = raw.get("control")
    if not isinstance(control, Mapping) or control.get("controllers") != "several":
        return
    store = raw.get("store")
    if store is None or (isinstance(store, str) and store.startswith("sqlite")):
        found = "nothing" if store is None else f'"{store}"'
        yield Conflict("store", f"{found}, with `control.controllers: several`", "postgresql://USER@HOST/NAME")
