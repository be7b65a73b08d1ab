"""Triton's configuration schema, from the protobuf messages in its client library; imported only here."""

from typing import Any

from forebay.core.serving.config import Datatype
from forebay.modelserver.repository.form.fill import Message

TYPES = {f"TYPE_{t.value}": t for t in Datatype if t is not Datatype.BYTES} | {"TYPE_STRING": Datatype.BYTES}
"""Datatypes by their names in configurations."""
TYPE_NAMES = {datatype: name for name, datatype in TYPES.items()}


def empty() -> Message:
    """An empty configuration. Raises `ImportError` without the extra `triton`."""
    from tritonclient.grpc import model_config_pb2

    return model_config_pb2.ModelConfig()


def document_of(message: Message) -> dict[str, Any]:
    """The configuration as Triton shows it: all plain fields, 64-bit integers as numbers instead of strings."""
    from google.protobuf import json_format

    document: dict[str, Any] = json_format.MessageToDict(
        message, preserving_proto_field_name=True, always_print_fields_with_no_presence=True
    )
    _numbers(document, message.DESCRIPTOR)
    return document


def message_of(document: dict[str, Any]) -> Message:
    """The inverse of `document_of`."""
    from google.protobuf import json_format

    return json_format.ParseDict(document, empty())


def enum_name(message: Message, field: str) -> str:
    """Name of an enum field's value; empty if the schema does not have it."""
    known = message.DESCRIPTOR.fields_by_name[field].enum_type.values_by_number.get(getattr(message, field))
    return "" if known is None else str(known.name)


def _numbers(document: dict[str, Any], of: Any) -> None:
    for field in of.fields:
        if field.name not in document:
            continue
        value = document[field.name]
        if field.message_type is not None:
            if field.message_type.GetOptions().map_entry:
                inner = field.message_type.fields_by_name["value"].message_type
                messages = list(value.values()) if inner is not None else []
            else:
                inner = field.message_type
                messages = value if field.is_repeated else [value]
            for message in messages:
                _numbers(message, inner)
        elif field.cpp_type in {field.CPPTYPE_INT64, field.CPPTYPE_UINT64}:
            document[field.name] = [int(item) for item in value] if field.is_repeated else int(value)
