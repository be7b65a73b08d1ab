"""The server under test over gRPC, with the messages of `tritonclient`. Imported only if needed."""

import base64
from collections.abc import AsyncIterator, Mapping, Sequence
from typing import Any, Final

import grpc
from google.protobuf import json_format
from tritonclient.grpc import service_pb2 as pb
from tritonclient.grpc import service_pb2_grpc

from forebay.cli.conformance.check import Json, without_paths
from forebay.cli.conformance.server import TIMEOUT_S, by_name
from forebay.cli.conformance.tensors import rounded, unpacked

MESSAGE_BYTES_MAX: Final = 256 * 1024 * 1024

CONTENTS: Final = {
    "BOOL": "bool_contents", "INT8": "int_contents", "INT16": "int_contents", "INT32": "int_contents",
    "INT64": "int64_contents", "UINT8": "uint_contents", "UINT16": "uint_contents", "UINT32": "uint_contents",
    "UINT64": "uint64_contents", "FP32": "fp32_contents", "FP64": "fp64_contents", "BYTES": "bytes_contents",
}  # fmt: skip
"""Field of the typed contents by datatype; FP16 and BF16 have none."""


class Rpc:
    """The 20 calls of the service; each returns an observation."""

    def __init__(self, address: str, headers: Mapping[str, str] | None = None) -> None:
        sizes = [(f"grpc.max_{way}_message_length", MESSAGE_BYTES_MAX) for way in ("send", "receive")]
        self._channel = grpc.aio.insecure_channel(address, options=sizes)
        self._metadata = tuple((headers or {}).items())
        self.stub = service_pb2_grpc.GRPCInferenceServiceStub(self._channel)

    async def close(self) -> None:
        """Close the connection."""
        await self._channel.close()

    async def call(self, name: str, message: Mapping[str, Json] | None = None) -> dict[str, Json]:
        """Call `name` with a request given in protobuf's JSON form (original field names)."""
        request = getattr(pb, f"{name}Request")()
        json_format.ParseDict(dict(message or {}), request)
        return await self.send(name, request)

    async def send(self, name: str, request: Any) -> dict[str, Json]:
        """Call `name`: `{"code": …, "error": …}`, or `{"code": "OK", …}` with the response's fields."""
        try:
            response = await getattr(self.stub, name)(request, timeout=TIMEOUT_S, metadata=self._metadata)
        except grpc.aio.AioRpcError as error:
            return {"code": error.code().name, "error": without_paths(error.details() or "")}
        if isinstance(response, pb.ModelInferResponse):
            return {"code": "OK", **inferred(response)}
        return {"code": "OK", **json_format.MessageToDict(response, preserving_proto_field_name=True)}

    async def stream(self, requests: Sequence[Any]) -> list[Json]:
        """Send the requests on one stream, one after the other, and collect all responses."""

        async def sent() -> AsyncIterator[Any]:
            for request in requests:
                yield request

        seen: list[Json] = []
        try:
            call = self.stub.ModelStreamInfer(sent(), timeout=TIMEOUT_S, metadata=self._metadata)
            async for response in call:
                seen.append(streamed(response))
        except grpc.aio.AioRpcError as error:
            seen.append({"code": error.code().name, "error": without_paths(error.details() or "")})
        return seen


def streamed(response: Any) -> Json:
    """The observation of one stream message."""
    if response.error_message:
        named = {"id": response.infer_response.id} if response.infer_response.id else {}
        return {"error": without_paths(response.error_message), **named}
    return inferred(response.infer_response)


def inferred(response: Any) -> dict[str, Json]:
    """The observation of an inference: outputs with their values, whatever their encoding."""
    outputs: list[dict[str, Json]] = []
    for number, output in enumerate(response.outputs):
        shown: dict[str, Json] = {"name": output.name, "datatype": output.datatype, "shape": list(output.shape)}
        if number < len(response.raw_output_contents):
            shown["raw"] = unpacked(output.datatype, response.raw_output_contents[number])
        elif output.HasField("contents"):
            typed = json_format.MessageToDict(output.contents, preserving_proto_field_name=True)
            shown["contents"] = rounded(output.datatype, next(iter(typed.values()), []))
        if output.parameters:
            shown["parameters"] = _parameters(output.parameters)
        outputs.append(shown)
    seen: dict[str, Json] = {"model": response.model_name, "version": response.model_version}
    seen["outputs"] = by_name(outputs)
    if response.id:
        seen["id"] = response.id
    if response.parameters:
        seen["parameters"] = _parameters(response.parameters)
    return seen


def _parameters(parameters: Mapping[str, Any]) -> dict[str, Json]:
    return {key: getattr(value, value.WhichOneof("parameter_choice")) for key, value in sorted(parameters.items())}


def infer(
    model: str,
    inputs: Sequence[tuple[str, str, Sequence[int], bytes | Sequence[Any] | None]],
    outputs: Sequence[str] = (),
    **more: Any,
) -> Any:
    """A request: inputs as name, datatype, shape and raw bytes, typed values or None; `parameters` as values."""
    parameters = more.pop("parameters", {})
    request = pb.ModelInferRequest(model_name=model, **more)
    for name, datatype, shape, data in inputs:
        tensor = request.inputs.add(name=name, datatype=datatype, shape=shape)
        if isinstance(data, bytes):
            request.raw_input_contents.append(data)
        elif data is not None:
            getattr(tensor.contents, CONTENTS[datatype]).extend(data)
    for output in outputs:
        request.outputs.add(name=output)
    for key, value in parameters.items():
        kind = {bool: "bool_param", int: "int64_param", str: "string_param", float: "double_param"}[type(value)]
        setattr(request.parameters[key], kind, value)
    return request


def text(data: bytes) -> str:
    """Bytes in protobuf's JSON form."""
    return base64.b64encode(data).decode()
