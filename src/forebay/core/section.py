"""What all sections of the cluster file have in common, and how two of them that do not go together are told."""

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, NamedTuple

from pydantic import BaseModel, ConfigDict, Field

NAME_PATTERN = r"^[a-z0-9]([a-z0-9._-]{0,61}[a-z0-9])?$"
Name = Annotated[str, Field(pattern=NAME_PATTERN)]


class Section(BaseModel):
    """A section: unknown keys are refused, and the docstring of a field is its description."""

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True, validate_default=True)


class Conflict(NamedTuple):
    """Two settings, each fine alone, that do not go together."""

    path: str
    found: str
    allowed: str


def sections(value: Any) -> list[Mapping[str, Any]]:
    """The entries of a list of sections, whatever the data is; what is no section counts as an empty one."""
    listed = value if isinstance(value, Sequence) and not isinstance(value, str) else []
    return [each if isinstance(each, Mapping) else {} for each in listed]
