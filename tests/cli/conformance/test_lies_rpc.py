"""The checks of any server over gRPC notice a service that answers something else than over HTTP."""

import asyncio
import struct
from typing import Any

import grpc
import httpx
import pytest
from tests.cli.conformance.honest import answered
from tritonclient.grpc import service_pb2 as pb
from tritonclient.grpc import service_pb2_grpc

from forebay.cli.conformance import anymodel, run
from forebay.cli.conformance.check import Result, Verdict
from forebay.cli.conformance.rpc import Rpc
from forebay.cli.conformance.server import Server

LIES = {
    "": [],
    "models not ready": ["models are ready"],
    "unknown model ready": ["models are ready"],
    "no inference": ["inference equals HTTP's"],
    "model_name": ["inference equals HTTP's"],
    "id": ["inference equals HTTP's"],
    "datatype": ["inference equals HTTP's"],
    "shape": ["inference equals HTTP's"],
    "values": ["inference equals HTTP's"],
    "an output less": ["inference equals HTTP's"],
}
"""What is wrong, and the checks that notice it."""


class Service(service_pb2_grpc.GRPCInferenceServiceServicer):  # type: ignore[misc] # tritonclient has no types
    """What `honest` is over HTTP, but for one lie."""

    def __init__(self, lie: str) -> None:
        self._lie = lie

    async def ServerLive(self, request: Any, context: Any) -> Any:  # noqa: N802 - the protocol's names
        return pb.ServerLiveResponse(live=True)

    async def ServerReady(self, request: Any, context: Any) -> Any:  # noqa: N802 - the protocol's name
        return pb.ServerReadyResponse(ready=True)

    async def ServerMetadata(self, request: Any, context: Any) -> Any:  # noqa: N802 - the protocol's name
        return pb.ServerMetadataResponse(name="honest")

    async def ModelReady(self, request: Any, context: Any) -> Any:  # noqa: N802 - the protocol's name
        known = request.name == "m"
        wrong = self._lie == ("models not ready" if known else "unknown model ready")
        return pb.ModelReadyResponse(ready=known is not wrong)

    async def ModelMetadata(self, request: Any, context: Any) -> Any:  # noqa: N802 - the protocol's name
        if request.name != "m":
            await context.abort(grpc.StatusCode.NOT_FOUND, "unknown")
        found = pb.ModelMetadataResponse(name="m")
        found.inputs.add(name="FIRST", datatype="FP32", shape=[-1, 2])
        for name in ("FIRST", "SECOND"):
            found.outputs.add(name=name, datatype="FP32", shape=[-1, 2])
        return found

    async def ModelInfer(self, request: Any, context: Any) -> Any:  # noqa: N802 - the protocol's name
        if request.model_name != "m":
            await context.abort(grpc.StatusCode.NOT_FOUND, "unknown")
        if self._lie == "no inference":
            await context.abort(grpc.StatusCode.UNIMPLEMENTED, "unknown")
        lies = self._lie
        found = pb.ModelInferResponse(
            model_name="x" if lies == "model_name" else "m", id="" if lies == "id" else request.id
        )
        for name in ("FIRST",) if lies == "an output less" else ("FIRST", "SECOND"):
            found.outputs.add(
                name=name,
                datatype="FP64" if lies == "datatype" else "FP32",
                shape=[2, 1] if lies == "shape" else [1, 2],
            )
            values = request.raw_input_contents[0] if name == "FIRST" else struct.pack("<2f", 1, 1)
            found.raw_output_contents.append(struct.pack("<2f", 7, 7) if lies == "values" else values)
        return found


@pytest.mark.parametrize("lie", LIES)
def test_wrong_answer_over_grpc_is_noticed(lie: str) -> None:
    results: list[Result] = []

    async def main() -> None:
        service = grpc.aio.server()
        service_pb2_grpc.add_GRPCInferenceServiceServicer_to_server(Service(lie), service)
        port = service.add_insecure_port("127.0.0.1:0")
        await service.start()
        rpc = Rpc(f"127.0.0.1:{port}")
        try:
            async with httpx.AsyncClient(transport=httpx.MockTransport(answered), base_url="http://server") as http:
                server = Server(http, rpc, models=["m"], may_infer=True)
                checks = [each for each in anymodel.checks() if each.grpc]
                await run.run(server, checks, {}, results.append)
        finally:
            await rpc.close()
            await service.stop(None)

    asyncio.run(main())
    noticed = [each.name for each in results if each.verdict is not Verdict.PASSED]
    assert noticed == [f"any/grpc/{name}" for name in LIES[lie]]
