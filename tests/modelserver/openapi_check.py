"""Checks responses against the published OpenAPI document of the model server."""

import json
import re
from typing import Any

import httpx
import msgspec
from jsonschema import Draft202012Validator

from forebay.wire.openapi import modelserver

DOCUMENT: dict[str, Any] = msgspec.json.decode(modelserver.document("1"))
JSON = "application/json"


def fits(method: str, path: str, status: int, content_type: str, body: bytes) -> None:
    """Raise if an answer is not described, unless nothing is said of its path and method."""
    for shape, methods in DOCUMENT["paths"].items():
        pattern = re.sub(r"{\w+}", "[^/]+", shape.replace("{version}", "[0-9]+"))
        named = path == shape or (path not in DOCUMENT["paths"] and re.fullmatch(pattern, path))
        if not named or method.lower() not in methods or not body:
            continue
        said = methods[method.lower()]["responses"][str(status)]["content"]
        media = content_type.partition(";")[0]
        assert not media or media in said, (path, media)
        if media == JSON:
            schema = {**said[media]["schema"], "components": DOCUMENT["components"]}
            Draft202012Validator(schema).validate(json.loads(body))


async def answered(response: httpx.Response) -> None:
    """The same for a client of httpx."""
    kind = response.headers.get("content-type", "")
    if kind.startswith(JSON):
        await response.aread()
        fits(response.request.method, response.request.url.path, response.status_code, kind, response.content)
