"""Bodies of requests that change the server: model repository and shared memory regions."""

from typing import Any, Final

from forebay.core.serving.errors import Refused
from forebay.wire.forms.base64_text import data_of
from forebay.wire.oip.fields import boolean, document, invalid, load, string, unsigned
from forebay.wire.oip.ports import MemoryKind, Region

CUDA_HANDLE_BYTES: Final = 64
"""The size of a cudaIpcMemHandle_t."""
CONFIG: Final = "config"
FILE: Final = "file:"
VERSION: Final = "version"
"""Parameter of load and unload: one version only. A Forebay extension."""


def read_index(body: bytes) -> bool:
    """Parse whether only ready models are wanted. Raises `Refused`."""
    ready = document(body).get("ready", False)
    if type(ready) is not bool:
        raise invalid("Invalid value for 'ready': expected a boolean")
    return ready


def read_load(body: bytes) -> dict[str, str | bytes | int | bool]:
    """Parse the parameters of a load request: a configuration, and files (decoded). Raises `Refused`."""
    read: dict[str, str | bytes | int | bool] = {}
    for name, value in _parameters(body).items():
        if name == CONFIG:
            read[name] = string(value, f"Unable to parse '{name}'")
        elif name.startswith(FILE):
            read[name] = _base64(value, name)
        elif name == VERSION:
            read[name] = _version(value)
        else:
            raise invalid(
                f"parameter '{name[:100]}' is unknown; load accepts '{CONFIG}', '{FILE}<path>' and '{VERSION}'"
            )
    return read


def read_unload(body: bytes) -> tuple[bool, str]:
    """Parse whether dependent models are unloaded too, and the only version to unload; empty: all. Raises
    `Refused`."""
    parameters = _parameters(body)
    dependents = boolean(parameters.get("unload_dependents", False), "Unable to parse 'unload_dependents'")
    return dependents, _version(parameters[VERSION]) if VERSION in parameters else ""


def read_region(kind: MemoryKind, name: str, body: bytes) -> Region:
    """Parse the registration of a region. Raises `Refused`."""
    if not name:
        raise invalid(f"'region name' is necessary to register {kind} shared memory region")
    fields = load(body)
    if type(fields) is not dict:
        fields = {}
    if kind is MemoryKind.SYSTEM:
        key = string(_field(fields, "key"), "Unable to parse 'key'")
        offset = unsigned(fields.get("offset", 0), "Unable to parse 'offset'")
        return Region(kind, name, unsigned(_field(fields, "byte_size"), "Unable to parse 'byte_size'"), offset, key)
    given = _field(fields, "raw_handle")
    handle = _base64(given.get("b64") if type(given) is dict else given, "raw_handle")
    size = unsigned(_field(fields, "byte_size"), "Unable to parse 'byte_size'")
    device = unsigned(_field(fields, "device_id"), "Unable to parse 'device_id'")
    if len(handle) != CUDA_HANDLE_BYTES:
        raise invalid("'raw_handle' must be a valid base64 encoded cudaIpcMemHandle_t")
    return Region(kind, name, size, device=device, handle=handle)


def _field(fields: dict[str, Any], name: str) -> Any:
    if name not in fields:
        raise invalid(f"Shared memory register request has no '{name}' field")
    return fields[name]


def _parameters(body: bytes) -> dict[str, Any]:
    parameters = document(body).get("parameters", {})
    if type(parameters) is not dict:
        raise invalid("attempt to get members for non-object")
    return parameters


def _version(value: Any) -> str:
    text = str(value) if type(value) is int else value
    if type(text) is not str or not (text.isascii() and text.isdigit()):
        raise invalid(f"Unable to parse '{VERSION}': expected the number of a version")
    return text


def _base64(value: Any, name: str) -> bytes:
    text = string(value, f"Unable to parse '{name}'")
    try:
        return data_of(text)
    except ValueError:
        raise _not_base64(name) from None


def _not_base64(name: str) -> Refused:
    return invalid(f"'{name}' is not base64")
