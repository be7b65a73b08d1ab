"""Descriptors of the gRPC front's services, for reflection clients (grpcurl, Postman, proxies).

The files of the inference protocol come from its client library. Those of the health service and of reflection itself
are written here, after grpc/health/v1/health.proto and grpc/reflection/v1/reflection.proto of grpc/grpc-proto.
"""

from collections.abc import Mapping, Sequence
from typing import Any, Final

from google.protobuf.descriptor_pb2 import FieldDescriptorProto, FileDescriptorProto
from google.protobuf.descriptor_pool import DescriptorPool
from google.protobuf.message_factory import GetMessageClass
from tritonclient.grpc import service_pb2

HEALTH: Final = "grpc.health.v1"
REFLECTION: Final = ("grpc.reflection.v1", "grpc.reflection.v1alpha")
"""Most clients still use the older version; both are the same except for the name."""
REQUEST: Final = "ServerReflectionRequest"
RESPONSE: Final = "ServerReflectionResponse"
_SCALARS: Final = {
    "string": FieldDescriptorProto.TYPE_STRING,
    "bytes": FieldDescriptorProto.TYPE_BYTES,
    "int32": FieldDescriptorProto.TYPE_INT32,
}
_STATES: Final = ("UNKNOWN", "SERVING", "NOT_SERVING", "SERVICE_UNKNOWN")
_MESSAGES: Final[Mapping[str, Mapping[str, tuple[int, str]]]] = {
    REQUEST: {
        "host": (1, "string"),
        "file_by_filename": (3, "one string"),
        "file_containing_symbol": (4, "one string"),
        "file_containing_extension": (5, "one ExtensionRequest"),
        "all_extension_numbers_of_type": (6, "one string"),
        "list_services": (7, "one string"),
    },
    "ExtensionRequest": {"containing_type": (1, "string"), "extension_number": (2, "int32")},
    RESPONSE: {
        "valid_host": (1, "string"),
        "original_request": (2, REQUEST),
        "file_descriptor_response": (4, "one FileDescriptorResponse"),
        "all_extension_numbers_response": (5, "one ExtensionNumberResponse"),
        "list_services_response": (6, "one ListServiceResponse"),
        "error_response": (7, "one ErrorResponse"),
    },
    "FileDescriptorResponse": {"file_descriptor_proto": (1, "many bytes")},
    "ExtensionNumberResponse": {"base_type_name": (1, "string"), "extension_number": (2, "many int32")},
    "ListServiceResponse": {"service": (1, "many ServiceResponse")},
    "ServiceResponse": {"name": (1, "string")},
    "ErrorResponse": {"error_code": (1, "int32"), "error_message": (2, "string")},
}
"""Number and type of each field; `one` marks members of the oneof."""
_CHOICES: Final = {REQUEST: "message_request", RESPONSE: "message_response"}


class Described:
    """Descriptor files of all services, in a pool of their own so that nothing else of this process is exposed.

    All methods raise `KeyError` for unknown names.
    """

    def __init__(self) -> None:
        self._pool = DescriptorPool()
        self._files: dict[str, Any] = {}
        self._take(service_pb2.DESCRIPTOR)
        for made in (_health(), *map(_reflection, REFLECTION)):
            self._add(made.SerializeToString())
        self.services: Sequence[str] = sorted(
            service.full_name for file in self._files.values() for service in file.services_by_name.values()
        )
        """Full names of the services."""

    def message(self, name: str) -> Any:
        """Class of a message."""
        return GetMessageClass(self._pool.FindMessageTypeByName(name))

    def file(self, name: str) -> Sequence[bytes]:
        """A file by name, followed by its dependencies."""
        return _whole(self._files[name])

    def file_with(self, symbol: str) -> Sequence[bytes]:
        """The file that declares a symbol, by its full name, followed by its dependencies."""
        try:
            file = self._pool.FindFileContainingSymbol(symbol)
        except KeyError:  # the lookup by symbol does not cover methods
            file = self._pool.FindMethodByName(symbol).containing_service.file
        return _whole(file)

    def _take(self, file: Any) -> None:
        for needed in file.dependencies:
            self._take(needed)
        if file.name not in self._files:
            self._add(file.serialized_pb)

    def _add(self, serialized: bytes) -> None:
        file = self._pool.AddSerializedFile(serialized)
        self._files[file.name] = file


def _whole(file: Any) -> Sequence[bytes]:
    found = {file.name: file.serialized_pb}
    for needed in file.dependencies:
        found.update((each, each) for each in _whole(needed))
    return list(found.values())


def _health() -> Any:
    file = FileDescriptorProto(name="grpc/health/v1/health.proto", package=HEALTH, syntax="proto3")
    _add_message(file, "HealthCheckRequest", {"service": (1, "string")})
    answer = file.message_type.add(name="HealthCheckResponse")
    states = answer.enum_type.add(name="ServingStatus")
    for number, state in enumerate(_STATES):
        states.value.add(name=state, number=number)
    kind = f".{HEALTH}.HealthCheckResponse.ServingStatus"
    answer.field.add(name="status", number=1, label=1, type=FieldDescriptorProto.TYPE_ENUM, type_name=kind)
    service = file.service.add(name="Health")
    types = {"input_type": f".{HEALTH}.HealthCheckRequest", "output_type": f".{HEALTH}.HealthCheckResponse"}
    service.method.add(name="Check", **types)
    service.method.add(name="Watch", server_streaming=True, **types)
    return file


def _reflection(package: str) -> Any:
    file = FileDescriptorProto(name=f"{package.replace('.', '/')}/reflection.proto", package=package, syntax="proto3")
    for name, fields in _MESSAGES.items():
        _add_message(file, name, fields)
    file.service.add(name="ServerReflection").method.add(
        name="ServerReflectionInfo",
        input_type=f".{package}.{REQUEST}",
        output_type=f".{package}.{RESPONSE}",
        client_streaming=True,
        server_streaming=True,
    )
    return file


def _add_message(file: Any, name: str, fields: Mapping[str, tuple[int, str]]) -> None:
    message = file.message_type.add(name=name)
    if name in _CHOICES:
        message.oneof_decl.add(name=_CHOICES[name])
    for field, (number, described) in fields.items():
        how, _, kind = described.rpartition(" ")
        many = how == "many"
        made = message.field.add(
            name=field,
            number=number,
            label=FieldDescriptorProto.LABEL_REPEATED if many else FieldDescriptorProto.LABEL_OPTIONAL,
            type=_SCALARS.get(kind, FieldDescriptorProto.TYPE_MESSAGE),
        )
        if kind not in _SCALARS:
            made.type_name = f".{file.package}.{kind}"
        if how == "one":
            made.oneof_index = 0
