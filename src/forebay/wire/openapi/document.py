"""Builds an OpenAPI 3.1 document from values that describe the operations."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Final, NamedTuple

import msgspec

from forebay.core.errors import TABLE, Code
from forebay.wire.openai_fields import Reader, Shape, shape_of

PATH: Final = "/openapi.json"
"""Where a server publishes its own document."""
VERSION: Final = "3.1.0"
JSON: Final = "application/json"
TEXT: Final = "text/plain"
EVENTS: Final = "text/event-stream"
OCTETS: Final = "application/octet-stream"

LISTENER: Final = (
    Code.BAD_HTTP,
    Code.REQUEST_TIMEOUT,
    Code.BODY_TOO_LARGE,
    Code.HEADERS_TOO_LARGE,
    Code.CONNECTION_LIMIT,
    Code.BODIES_LIMIT,
    Code.INTERNAL,
)
"""The errors that any request may get."""


class Header(NamedTuple):
    """A header of a request or response, and the shape of its value."""

    name: str
    text: str
    shape: Shape


class Parameter(NamedTuple):
    """A parameter in the path, where it is required, or in the query."""

    name: str
    place: str
    text: str
    shape: Shape
    required: bool = False


class Operation(NamedTuple):
    """One method of one path.

    `answers`: its responses by status and media type; None: text, or bytes. `body`: the reader of its request; or
    else `bodies`: request types by media type. `codes`: errors it may respond with, besides those of every request;
    `error` is their shape.
    """

    path: str
    method: str
    id: str
    text: str
    answers: Mapping[int, Mapping[str, type | None]]
    error: type
    body: Reader | None = None
    body_name: str = ""
    parameters: tuple[Parameter, ...] = ()
    headers: tuple[Header, ...] = ()
    answer_headers: tuple[Header, ...] = ()
    error_headers: tuple[Header, ...] = ()
    codes: tuple[Code, ...] = ()
    secured: bool = False
    bodies: Mapping[str, type | None] = {}
    body_needed: bool = True


def make_document(
    title: str,
    text: str,
    version: str,
    operations: Sequence[Operation],
    security: Mapping[str, Shape] | None = None,
) -> bytes:
    """The document as JSON. `security`: the ways to authenticate, any of which suffices; none: no authentication."""
    kinds = _kinds(operations)
    shapes, components = msgspec.json.schema_components(kinds, ref_template="#/components/schemas/{name}")
    known = dict(zip(kinds, shapes, strict=True))
    paths: dict[str, dict[str, Shape]] = {}
    for each in operations:
        shown = _operation(each, known)
        if each.body is not None:
            components[each.body_name] = {"title": each.body_name, **shape_of(each.body)}
        if each.secured and security:
            shown["security"] = [{name: []} for name in security]
        paths.setdefault(each.path, {})[each.method] = shown
    parts: Shape = {"schemas": dict(sorted(components.items()))}
    if security:
        parts["securitySchemes"] = security
    info = {"title": title, "version": version, "description": text}
    return msgspec.json.encode({"openapi": VERSION, "info": info, "paths": paths, "components": parts})


def _kinds(operations: Iterable[Operation]) -> list[type]:
    found: dict[type, None] = {}
    for each in operations:
        found[each.error] = None
        for media in (*each.answers.values(), each.bodies):
            found |= dict.fromkeys(kind for kind in media.values() if kind is not None)
    return list(found)


def _operation(operation: Operation, known: Mapping[type, Shape]) -> Shape:
    shown: Shape = {"operationId": operation.id, "summary": operation.text}
    parameters = [
        {"name": name, "in": place, "description": text, "required": place == "path" or required, "schema": shape}
        for name, place, text, shape, required in operation.parameters
    ]
    parameters += [
        {"name": name, "in": "header", "description": text, "schema": shape}
        for name, text, shape in operation.headers
    ]
    if parameters:
        shown["parameters"] = parameters
    if operation.body is not None:
        content = {JSON: {"schema": {"$ref": f"#/components/schemas/{operation.body_name}"}}}
        shown["requestBody"] = {"required": operation.body_needed, "content": content}
    elif operation.bodies:
        content = {media: {"schema": _shape(kind, known)} for media, kind in operation.bodies.items()}
        shown["requestBody"] = {"required": operation.body_needed, "content": content}
    coded = _by_status((*LISTENER, *operation.codes))
    shown["responses"] = {
        str(status): _answer(operation, status, coded.get(status, ()), known)
        for status in sorted({*operation.answers, *coded})
    }
    return shown


def _answer(operation: Operation, status: int, codes: Sequence[Code], known: Mapping[type, Shape]) -> Shape:
    """The description of one status: a response, errors, or both."""
    media = operation.answers.get(status)
    texts = [f"- `{code}`: {TABLE[code].text}" for code in codes]
    content: dict[str, Shape] = {}
    headers: tuple[Header, ...] = ()
    if media is not None:
        texts.insert(0, "Success." if status < 400 else "Failure. Or an error:" if codes else "Failure.")
        content = {name: _shape(kind, known) for name, kind in media.items()}
        headers += operation.answer_headers
    if codes:
        error = known[operation.error]
        content[JSON] = {"anyOf": [content[JSON], error]} if JSON in content else error
        headers += operation.error_headers
    return {
        "description": "\n".join(texts),
        "headers": {name: {"description": text, "schema": shape} for name, text, shape in headers},
        "content": {name: {"schema": shape} for name, shape in content.items()},
    }


def _shape(kind: type | None, known: Mapping[type, Shape]) -> Shape:
    return {"type": "string"} if kind is None else known[kind]


def _by_status(codes: Iterable[Code]) -> dict[int, list[Code]]:
    found: dict[int, list[Code]] = {}
    for code in dict.fromkeys(codes):
        found.setdefault(TABLE[code].status, []).append(code)
    return found
