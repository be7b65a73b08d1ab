"""HTTP requests with one error each, and a few that look wrong but are valid."""

import gzip
import json
from collections.abc import Mapping
from typing import Any, Final

from forebay.cli.conformance.check import Check, Json
from forebay.cli.conformance.server import HEADER_LENGTH, Server
from forebay.cli.conformance.tensors import packed

ONES: Final = [1.0, 1.0, 1.0, 1.0]
RAW: Final = packed("FP32", ONES)
PATH: Final = "/v2/models/add_sub/infer"


def vector(name: Json = "IN0", **changes: Any) -> dict[str, Any]:
    """A valid input of `add_sub` with changes; a change to None removes the field."""
    fields = {"name": name, "datatype": "FP32", "shape": [1, 4], "data": ONES, **changes}
    return {key: value for key, value in fields.items() if value is not None}


def request(first: Any = None, **more: Any) -> dict[str, Any]:
    """A request for `add_sub` with this first input and these additional fields."""
    return {"inputs": [vector() if first is None else first, vector("IN1")], **more}


def raw(size: Any, name: str = "IN0") -> dict[str, Any]:
    """An input with binary data."""
    return vector(name, data=None, parameters={"binary_data_size": size})


BODIES: Final[dict[str, bytes | Json]] = {
    "empty": b"",
    "not JSON": b"hello",
    "broken off": b'{"inputs": [',
    "more after it": b'{"inputs": []} {}',
    "a list": [],
    "an empty object": {},
    "a number": b"7",
    "not UTF-8": b'{"inputs": "\xff\xfe"}',
    "deeply nested": b'{"inputs": ' + b"[" * 20_000 + b"]" * 20_000 + b"}",
    "inputs an object": {"inputs": {}},
    "inputs null": {"inputs": None},
    "inputs empty": {"inputs": []},
    "input a number": {"inputs": [7]},
    "one input missing": {"inputs": [vector()]},
    "input twice": {"inputs": [vector(), vector("IN1"), vector()]},
    "input unknown": {"inputs": [vector(), vector("IN1"), vector("IN7")]},
    "input renamed": request(vector("IN7")),
    "input without name": request(vector(name=None)),
    "input name a number": request(vector(name=7)),
    "input without datatype": request(vector(datatype=None)),
    "input datatype unknown": request(vector(datatype="FP31")),
    "input datatype in lower case": request(vector(datatype="fp32")),
    "input datatype a number": request(vector(datatype=32)),
    "input datatype another": request(vector(datatype="INT32", data=[1, 1, 1, 1])),
    "input without shape": request(vector(shape=None)),
    "shape a string": request(vector(shape="1,4")),
    "shape of strings": request(vector(shape=["1", "4"])),
    "shape of fractions": request(vector(shape=[1.5, 4])),
    "shape negative": request(vector(shape=[-1, 4])),
    "shape negative twice": request(vector(shape=[-1, -4])),
    "shape empty": request(vector(shape=[])),
    "shape without batch": request(vector(shape=[4])),
    "shape with more dimensions": request(vector(shape=[1, 1, 4])),
    "shape another": request(vector(shape=[1, 5], data=[1.0] * 5)),
    "shape huge": request(vector(shape=[1, 4_000_000_000_000])),
    "shape that overflows": request(vector(shape=[2**62, 2**62])),
    "shape beyond 64 bits": request(vector(shape=[2**64, 4])),
    "batch of none": {"inputs": [vector(shape=[0, 4], data=[]), vector("IN1", shape=[0, 4], data=[])]},
    "batch too large": {"inputs": [vector(shape=[9, 4], data=ONES * 9), vector("IN1", shape=[9, 4], data=ONES * 9)]},
    "batches that differ": request(vector(shape=[2, 4], data=ONES * 2)),
    "no data": request(vector(data=None)),
    "data null": b'{"inputs": [{"name": "IN0", "datatype": "FP32", "shape": [1, 4], "data": null}]}',
    "data too short": request(vector(data=ONES[:3])),
    "data too long": request(vector(data=[1.0] * 5)),
    "data a number": request(vector(data=1.0)),
    "data an object": request(vector(data={"0": 1})),
    "data of strings": request(vector(data=["1", "2", "3", "4"])),
    "data of booleans": request(vector(data=[True, True, False, True])),
    "data with null": request(vector(data=[1.0, None, 1.0, 1.0])),
    "data of whole numbers": request(vector(data=[1, 2, 3, 4])),
    "data nested": request(vector(data=[[1.0, 1.0, 1.0, 1.0]])),
    "data nested oddly": request(vector(data=[[1.0], [1.0, [1.0]], 1.0])),
    "data beyond FP32": request(vector(data=[1e300, 1.0, 1.0, 1.0])),
    "outputs an object": request(outputs={}),
    "outputs empty": request(outputs=[]),
    "output a string": request(outputs=["OUT0"]),
    "output without name": request(outputs=[{}]),
    "output unknown": request(outputs=[{"name": "OUT7"}]),
    "output twice": request(outputs=[{"name": "OUT0"}, {"name": "OUT0"}]),
    "output is an input": request(outputs=[{"name": "IN0"}]),
    "id a number": request(id=7),
    "unknown field": request(colour="green"),
    "parameters a list": request(parameters=[]),
    "parameter an object": request(parameters={"x": {}}),
    "parameter null": request(parameters={"x": None}),
    "parameter a list": request(parameters={"x": [1]}),
    "parameter of each kind": request(parameters={"a": True, "b": 7, "c": "text", "d": 1.5}),
    "priority a string": request(parameters={"priority": "high"}),
    "priority negative": request(parameters={"priority": -1}),
    "priority of a model without": request(parameters={"priority": 1}),
    "timeout a string": request(parameters={"timeout": "soon"}),
    "timeout of a model without": request(parameters={"timeout": 1}),
    "timeout negative": request(parameters={"timeout": -5}),
    "sequence id of a model without": request(parameters={"sequence_id": 5, "sequence_start": True}),
    "sequence start a number": request(parameters={"sequence_id": 5, "sequence_start": 1}),
    "sequence id negative": request(parameters={"sequence_id": -5}),
    "sequence id a boolean": request(parameters={"sequence_id": True}),
    "reserved parameter": request(parameters={"triton_enable_empty_final_response": True}),
    "reserved prefix": request(parameters={"triton_anything": 1}),
    "binary_data_output a string": request(parameters={"binary_data_output": "yes"}),
    "binary_data a string": request(outputs=[{"name": "OUT0", "parameters": {"binary_data": "yes"}}]),
    "binary_data a number": request(outputs=[{"name": "OUT0", "parameters": {"binary_data": 1}}]),
    "binary size without header": request(raw(16)),
    "classification of none": request(outputs=[{"name": "OUT0", "parameters": {"classification": 0}}]),
    "classification negative": request(outputs=[{"name": "OUT0", "parameters": {"classification": -1}}]),
    "classification a string": request(outputs=[{"name": "OUT0", "parameters": {"classification": "2"}}]),
    "shared memory unknown": request(
        vector(data=None, parameters={"shared_memory_region": "nowhere", "shared_memory_byte_size": 16})
    ),
    "shared memory without size": request(vector(data=None, parameters={"shared_memory_region": "nowhere"})),
    "shared memory region a number": request(
        vector(data=None, parameters={"shared_memory_region": 7, "shared_memory_byte_size": 16})
    ),
    "shared memory of an output": request(
        outputs=[{"name": "OUT0", "parameters": {"shared_memory_region": "nowhere", "shared_memory_byte_size": 16}}]
    ),
}
"""Bodies for `add_sub`: two FP32 inputs [batch, 4], batch size at most 8."""

Binary = tuple[Mapping[str, str], Json, bytes]
BINARIES: Final[dict[str, Binary]] = {
    "right": ({}, {"inputs": [raw(16), raw(16, "IN1")]}, RAW * 2),
    "mixed with JSON": ({}, {"inputs": [vector(), raw(16, "IN1")]}, RAW),
    "too short": ({}, {"inputs": [raw(16), raw(16, "IN1")]}, RAW + RAW[:8]),
    "too long": ({}, {"inputs": [raw(16), raw(16, "IN1")]}, RAW * 3),
    "size too small": ({}, {"inputs": [raw(12), raw(16, "IN1")]}, RAW[:12] + RAW),
    "size too large": ({}, {"inputs": [raw(20), raw(16, "IN1")]}, RAW + RAW[:4] + RAW),
    "size negative": ({}, {"inputs": [raw(-16), raw(16, "IN1")]}, RAW * 2),
    "size a string": ({}, {"inputs": [raw("16"), raw(16, "IN1")]}, RAW * 2),
    "size zero": ({}, {"inputs": [raw(0), raw(16, "IN1")]}, RAW),
    "size beyond 64 bits": ({}, {"inputs": [raw(2**64), raw(16, "IN1")]}, RAW * 2),
    "size and data": ({}, {"inputs": [{**raw(16), "data": ONES}, raw(16, "IN1")]}, RAW * 2),
    "header too large": ({HEADER_LENGTH: "100000"}, {"inputs": [raw(16), raw(16, "IN1")]}, RAW * 2),
    "header too small": ({HEADER_LENGTH: "5"}, {"inputs": [raw(16), raw(16, "IN1")]}, RAW * 2),
    "header zero": ({HEADER_LENGTH: "0"}, {"inputs": [raw(16), raw(16, "IN1")]}, RAW * 2),
    "header negative": ({HEADER_LENGTH: "-1"}, {"inputs": [raw(16), raw(16, "IN1")]}, RAW * 2),
    "header not a number": ({HEADER_LENGTH: "many"}, {"inputs": [raw(16), raw(16, "IN1")]}, RAW * 2),
    "header beyond 64 bits": (
        {HEADER_LENGTH: "99999999999999999999"},
        {"inputs": [raw(16), raw(16, "IN1")]},
        RAW * 2,
    ),
}
"""Headers, JSON, and the binary data after it."""

WORD: Final = packed("BYTES", [b"word"])
WORDS: Final[dict[str, tuple[list[int], bytes]]] = {
    "right": ([2], WORD * 2),
    "one too few": ([2], WORD),
    "one too many": ([2], WORD * 3),
    "length broken off": ([2], WORD + b"\x04\x00"),
    "text broken off": ([2], WORD + b"\x04\x00\x00\x00wo"),
    "length huge": ([2], WORD + b"\xff\xff\xff\xffword"),
    "empty words": ([2], b"\x00" * 8),
    "none": ([0], b""),
}
"""Shape and data of BYTES inputs."""

PLACES: Final[dict[str, tuple[str, str]]] = {
    "infer with GET": ("GET", PATH),
    "infer with PUT": ("PUT", PATH),
    "infer of version 1": ("POST", "/v2/models/add_sub/versions/1/infer"),
    "infer of version 9": ("POST", "/v2/models/add_sub/versions/9/infer"),
    "infer of version 0": ("POST", "/v2/models/add_sub/versions/0/infer"),
    "infer of version -1": ("POST", "/v2/models/add_sub/versions/-1/infer"),
    "infer of version x": ("POST", "/v2/models/add_sub/versions/x/infer"),
    "infer of version beyond 64 bits": ("POST", "/v2/models/add_sub/versions/99999999999999999999/infer"),
    "infer of an unknown model": ("POST", "/v2/models/no_such_model/infer"),
    "infer with a slash after it": ("POST", PATH + "/"),
    "infer with a query": ("POST", PATH + "?x=1"),
    "infer with two slashes": ("POST", "/v2//models/add_sub/infer"),
    "infer percent-encoded": ("POST", "/v2/models/add%5Fsub/infer"),
    "an unknown action": ("POST", "/v2/models/add_sub/transform"),
    "model with POST": ("POST", "/v2/models/add_sub"),
    "model": ("GET", "/v2/models/add_sub"),
    "model version": ("GET", "/v2/models/add_sub/versions/1"),
    "model version 9": ("GET", "/v2/models/add_sub/versions/9"),
    "model unknown": ("GET", "/v2/models/no_such_model"),
    "model ready": ("GET", "/v2/models/add_sub/ready"),
    "model ready with POST": ("POST", "/v2/models/add_sub/ready"),
    "model version ready": ("GET", "/v2/models/add_sub/versions/1/ready"),
    "model version 9 ready": ("GET", "/v2/models/add_sub/versions/9/ready"),
    "model version x ready": ("GET", "/v2/models/add_sub/versions/x/ready"),
    "model unknown ready": ("GET", "/v2/models/no_such_model/ready"),
    "config": ("GET", "/v2/models/add_sub/config"),
    "config of version 1": ("GET", "/v2/models/add_sub/versions/1/config"),
    "config of version 9": ("GET", "/v2/models/add_sub/versions/9/config"),
    "config of an unknown model": ("GET", "/v2/models/no_such_model/config"),
    "config with POST": ("POST", "/v2/models/add_sub/config"),
    "statistics of an unknown model": ("GET", "/v2/models/no_such_model/stats"),
    "statistics of version 9": ("GET", "/v2/models/add_sub/versions/9/stats"),
    "statistics of version x": ("GET", "/v2/models/add_sub/versions/x/stats"),
    "statistics with POST": ("POST", "/v2/models/add_sub/stats"),
    "live": ("GET", "/v2/health/live"),
    "live with POST": ("POST", "/v2/health/live"),
    "an unknown health": ("GET", "/v2/health/well"),
    "server with POST": ("POST", "/v2"),
    "server with a slash": ("GET", "/v2/"),
    "root": ("GET", "/"),
    "models": ("GET", "/v2/models"),
}
"""Method and path; POST requests carry a valid body for `add_sub`."""


def _body(name: str, body: bytes | Json) -> Check:
    async def run(server: Server) -> Json:
        return (await server.ask("POST", PATH, body)).inferred()

    return Check(f"infer/json/{name}", run, ("add_sub",))


def _binary(name: str, headers: Mapping[str, str], head: Json, data: bytes) -> Check:
    async def run(server: Server) -> Json:
        return (await server.infer("add_sub", head, data, headers=headers)).inferred()

    return Check(f"infer/binary/{name}", run, ("add_sub",))


def _words(name: str, shape: list[int], data: bytes) -> Check:
    async def run(server: Server) -> Json:
        given = {
            "name": "IN_BYTES",
            "datatype": "BYTES",
            "shape": shape,
            "parameters": {"binary_data_size": len(data)},
        }
        text = json.dumps({"inputs": [given], "outputs": [{"name": "OUT_BYTES"}]}).encode()
        headers = {HEADER_LENGTH: str(len(text))}
        return (await server.ask("POST", "/v2/models/types/infer", text + data, headers)).inferred()

    return Check(f"infer/binary/words {name}", run, ("types",))


def _place(name: str, method: str, path: str) -> Check:
    async def run(server: Server) -> Json:
        seen = (await server.ask(method, path, request() if method in {"POST", "PUT"} else None)).inferred()
        if path.endswith(("/live", "/ready")):
            seen.pop("body", None)  # the protocol specifies a JSON body here, Triton sends none
        return seen

    return Check(f"http/{name}", run, ("add_sub",))


def _coded(name: str, coding: str, body: bytes) -> Check:
    async def run(server: Server) -> Json:
        return (await server.ask("POST", PATH, body, {"content-encoding": coding})).inferred()

    return Check(f"http/{name}", run, ("add_sub",))


def checks() -> list[Check]:
    """One check per row of the tables."""
    good = json.dumps(request()).encode()
    return [
        *(_body(name, body) for name, body in BODIES.items()),
        *(_binary(name, *parts) for name, parts in BINARIES.items()),
        *(_words(name, *parts) for name, parts in WORDS.items()),
        *(_place(name, *where) for name, where in PLACES.items()),
        _coded("gzip", "gzip", gzip.compress(good)),
        _coded("gzip broken off", "gzip", gzip.compress(good)[:-12]),
        _coded("gzip that is none", "gzip", good),
        _coded("an unknown coding", "br", good),
    ]
