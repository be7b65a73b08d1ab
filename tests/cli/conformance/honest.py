"""A small server of the protocol that does everything right, to be made to do single things wrong."""

import json
import math
import re
import struct
from typing import Any

import httpx

from forebay.cli.conformance.server import HEADER_LENGTH

EXTENSIONS = ["binary_tensor_data", "model_configuration", "statistics", "model_repository"]
NAMES = ("FIRST", "SECOND")
TENSORS = [{"name": name, "datatype": "FP32", "shape": [-1, 2]} for name in NAMES]
CONFIGURED = [{"name": name, "data_type": "TYPE_FP32", "dims": [2]} for name in NAMES]
TIMES = ("success", "fail", "queue", "compute_input", "compute_infer", "compute_output")
STATISTICS = {
    "name": "m",
    "version": "1",
    "inference_count": 0,
    "execution_count": 0,
    "inference_stats": {part: {"count": 0, "ns": 0} for part in TIMES},
    "batch_stats": [],
}
DOCUMENTS: dict[str, Any] = {
    "/v2": {"name": "honest", "version": "1", "extensions": EXTENSIONS},
    "/v2/health/live": {},
    "/v2/health/ready": {},
    "/v2/models/m": {"name": "m", "versions": ["1"], "platform": "", "inputs": TENSORS[:1], "outputs": TENSORS},
    "/v2/models/m/ready": {},
    "/v2/models/m/config": {"name": "m", "max_batch_size": 8, "input": CONFIGURED[:1], "output": CONFIGURED},
    "/v2/models/m/stats": {"model_stats": [STATISTICS]},
    "/v2/repository/index": [{"name": "m", "version": "1", "state": "READY"}],
}


def answered(request: httpx.Request) -> httpx.Response:
    """Its answer."""
    path = request.url.path.replace("/versions/1", "")
    if path == "/v2/models/m/infer":
        try:
            return _inferred(request.content, request.headers.get(HEADER_LENGTH))
        except (ArithmeticError, AttributeError, AssertionError, LookupError, TypeError, ValueError) as error:
            return httpx.Response(400, json={"error": f"wrong: {error!r}"})
    if path in DOCUMENTS:
        return httpx.Response(200, json=DOCUMENTS[path])
    return httpx.Response(404, json={"error": f"{path} does not exist"})


def _inferred(content: bytes, length: str | None) -> httpx.Response:
    """The input as the first output, and 1 as the second one."""
    at = len(content) if length is None else int(length)
    assert 0 <= at <= len(content)
    body = json.loads(content[:at])
    (given,) = body["inputs"]
    rows, width = given["shape"]
    assert (given["name"], given["datatype"], width) == ("FIRST", "FP32", 2)
    data = given.get("data") or [*struct.unpack(f"<{rows * width}f", content[at:])]
    assert len(data) == rows * width
    assert rows > 0
    values = {"FIRST": data, "SECOND": [1.0] * len(data)}
    wanted = [each["name"] for each in body.get("outputs", ())] or NAMES
    outputs = [{"name": name, "datatype": "FP32", "shape": [rows, width], "data": values[name]} for name in wanted]
    head = {"model_name": "m", "model_version": "1", "outputs": outputs, **{k: body[k] for k in ("id",) if k in body}}
    if not body.get("parameters", {}).get("binary_data_output"):
        return httpx.Response(200, json=head)
    parts = [struct.pack(f"<{len(data)}f", *output.pop("data")) for output in outputs]
    for output in outputs:
        output["parameters"] = {"binary_data_size": 4 * math.prod(output["shape"])}
    text = json.dumps(head).encode()
    return httpx.Response(200, headers={HEADER_LENGTH: str(len(text))}, content=text + b"".join(parts))


def changed(answer: httpx.Response, place: str, value: object) -> httpx.Response:
    """The answer, if it is of JSON, with another value at a place such as `outputs.0.shape`; `None` takes it away."""
    document = answer.json()
    *way, last = (int(step) if re.fullmatch(r"\d+", step) else step for step in place.split("."))
    inner = document
    for step in way:
        inner = inner[step]
    if value is None:
        del inner[last]
    else:
        inner[last] = value
    return httpx.Response(answer.status_code, json=document)
