"""The base of all sections of the cluster file, and what their checks share."""

import re
from collections.abc import Mapping, Sequence
from ipaddress import ip_address
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field

NAME_PATTERN = r"^[a-z0-9]([a-z0-9._-]{0,61}[a-z0-9])?$"
Name = Annotated[str, Field(pattern=NAME_PATTERN)]
_HOST_NAME = re.compile(r"[A-Za-z0-9_-]{1,63}(\.[A-Za-z0-9_-]{1,63})*")


class Section(BaseModel):
    """A section. Unknown keys are rejected; the docstring of a field is its description."""

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True, validate_default=True)


def sections(value: Any) -> list[Mapping[str, Any]]:
    """The entries of a list of sections, from unvalidated data; anything that is not a section counts as an empty
    one."""
    listed = value if isinstance(value, Sequence) and not isinstance(value, str) else []
    return [each if isinstance(each, Mapping) else {} for each in listed]


def is_host(text: str) -> bool:
    """Whether a text is an IP address or a host name, without a port."""
    try:
        ip_address(text)
    except ValueError:
        return _HOST_NAME.fullmatch(text) is not None
    return True
