"""The JSON documents of the infer endpoint, as msgspec reads and writes them.

They are apart from what uses them because that is compiled, and these classes cannot be.
"""

from typing import Any, Final

import msgspec

NO_DATA: Final = msgspec.Raw(b"")
"""There is no field `data`."""


class GivenInput(msgspec.Struct):
    """An input of a request. Fields that have a wrong type are found by who reads them."""

    name: Any = msgspec.UNSET
    datatype: Any = msgspec.UNSET
    shape: Any = msgspec.UNSET
    parameters: Any = msgspec.UNSET
    data: msgspec.Raw = NO_DATA


class GivenOutput(msgspec.Struct):
    """An output that a request asks for."""

    name: Any = msgspec.UNSET
    parameters: Any = msgspec.UNSET


class Given(msgspec.Struct):
    """A request."""

    inputs: list[GivenInput]
    outputs: list[GivenOutput] = []
    id: Any = msgspec.UNSET
    parameters: Any = msgspec.UNSET


class ToldOutput(msgspec.Struct):
    """An output in an answer."""

    name: str
    datatype: str
    shape: tuple[int, ...]
    parameters: Any = msgspec.UNSET
    data: Any = msgspec.UNSET


class Told(msgspec.Struct):
    """An answer."""

    id: Any
    model_name: str
    model_version: str
    parameters: Any
    outputs: list[ToldOutput]
