"""The JSON documents of the infer endpoint, as msgspec structs.

They are in a module of their own because the modules that use them are compiled, and these classes cannot be.
"""

from typing import Any, Final

import msgspec

NO_DATA: Final = msgspec.Raw(b"")
"""The field `data` is absent."""


class GivenInput(msgspec.Struct):
    """An input of a request. The types of its fields are checked by the code that reads them."""

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


class LongInput(msgspec.Struct):
    """An input of a long request: its fields stay undecoded until their length has been checked."""

    name: msgspec.Raw = NO_DATA
    datatype: msgspec.Raw = NO_DATA
    shape: msgspec.Raw = NO_DATA
    parameters: msgspec.Raw = NO_DATA
    data: msgspec.Raw = NO_DATA


class LongOutput(msgspec.Struct):
    """An output that a long request asks for."""

    name: msgspec.Raw = NO_DATA
    parameters: msgspec.Raw = NO_DATA


class Long(msgspec.Struct):
    """A long request."""

    inputs: list[LongInput]
    outputs: list[LongOutput] = []
    id: msgspec.Raw = NO_DATA
    parameters: msgspec.Raw = NO_DATA


class ToldOutput(msgspec.Struct):
    """An output in a response."""

    name: str
    datatype: str
    shape: tuple[int, ...]
    parameters: Any = msgspec.UNSET
    data: Any = msgspec.UNSET


class Told(msgspec.Struct):
    """A response."""

    id: Any
    model_name: str
    model_version: str
    parameters: Any
    outputs: list[ToldOutput]
