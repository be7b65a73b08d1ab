"""The base of all sections of the cluster file, and the record of a conflict between settings."""

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, NamedTuple

from pydantic import BaseModel, ConfigDict, Field

NAME_PATTERN = r"^[a-z0-9]([a-z0-9._-]{0,61}[a-z0-9])?$"
Name = Annotated[str, Field(pattern=NAME_PATTERN)]


class Section(BaseModel):
    """A section. Unknown keys are rejected; the docstring of a field is its description."""

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True, validate_default=True)


class Conflict(NamedTuple):
    """A setting that is valid alone but conflicts with another one: its path, its value and what is allowed."""

    path: str
    found: str
    allowed: str


def sections(value: Any) -> list[Mapping[str, Any]]:
    """The entries of a list of sections, from unvalidated data; anything that is not a section counts as an empty
    one."""
    listed = value if isinstance(value, Sequence) and not isinstance(value, str) else []
    return [each if isinstance(each, Mapping) else {} for each in listed]
