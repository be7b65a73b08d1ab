"""The admin API of control as an OpenAPI document."""

from typing import Final

from forebay.core.errors import Code
from forebay.wire.openapi import answers
from forebay.wire.openapi.document import JSON, PATH, TEXT, Operation, Parameter, make_document

_AFTER: Final = Parameter(
    "after", "query", "Only events with a higher number.", {"type": "string", "pattern": "^[0-9]{1,18}$"}
)


def operations(status: type, events: type, reloaded: type) -> tuple[Operation, ...]:
    """All there are; the arguments are the types of the documents that control answers with."""
    return (
        _get("/livez", "livez", "Whether control runs.", {200: {TEXT: None}}),
        _get("/readyz", "readyz", "Whether the cluster serves every model.", {200: {TEXT: None}, 503: {TEXT: None}}),
        _get("/metrics", "metrics", "Control's metrics, in Prometheus' text format.", {200: {TEXT: None}}),
        _get("/v1/status", "status", "The cluster: models, replicas, gateways.", {200: {JSON: status}}),
        _get(
            "/v1/events",
            "events",
            "What has happened, the oldest first.",
            {200: {JSON: events}},
            parameters=(_AFTER,),
            codes=(Code.INVALID_REQUEST,),
        ),
        Operation(
            "/v1/reload",
            "post",
            "reload",
            "Read the cluster file again and take it over; if it has problems, nothing is changed.",
            {200: {JSON: reloaded}, 422: {JSON: reloaded}},
            answers.Error,
            codes=(Code.INVALID_REQUEST,),
        ),
        _get(PATH, "openapi", "This document.", {200: {JSON: dict}}),
    )


def document(version: str, status: type, events: type, reloaded: type) -> bytes:
    """The document as JSON."""
    text = "What control knows of its cluster. Nothing but `/v1/reload` changes anything."
    return make_document("Forebay admin", text, version, operations(status, events, reloaded))


def _get(
    path: str,
    id: str,
    text: str,
    said: dict[int, dict[str, type | None]],
    *,
    parameters: tuple[Parameter, ...] = (),
    codes: tuple[Code, ...] = (),
) -> Operation:
    return Operation(path, "get", id, text, said, answers.Error, parameters=parameters, codes=codes)
