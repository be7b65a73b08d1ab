"""Ten checks with KServe's own clients, run by the interpreter of the environment that `scripts/oracle kserve` makes:

    python kserve_checks.py URL GRPC

The server has `add_sub` and `types` of the conformance suite loaded. Prints one line per check; exit code 1 if one
does not hold.
"""

import asyncio
import sys
import traceback
from collections.abc import Awaitable, Callable
from typing import Any

import numpy as np
from kserve import InferenceGRPCClient, InferenceRESTClient, InferInput, InferRequest, RESTConfig
from kserve.protocol.infer_type import RequestedOutput

ONES = np.ones((1, 4), dtype=np.float32)


def request(binary: bool, model: str = "add_sub", **more: Any) -> InferRequest:
    """Sum and difference of ones and twos."""
    inputs = [InferInput("IN0", [1, 4], "FP32"), InferInput("IN1", [1, 4], "FP32")]
    inputs[0].set_data_from_numpy(2 * ONES, binary_data=binary)
    inputs[1].set_data_from_numpy(ONES, binary_data=binary)
    return InferRequest(model_name=model, infer_inputs=inputs, **more)


def outputs(answer: Any) -> dict[str, list[Any]]:
    """Values by name."""
    return {each.name: each.as_numpy().reshape(-1).tolist() for each in answer.outputs}


async def refusal(answer: Awaitable[Any]) -> str:
    """What the client's exception says; empty if there is none."""
    try:
        await answer
    except Exception as error:
        return str(error)
    return ""


SUMS = {"OUT0": [3.0] * 4, "OUT1": [1.0] * 4}


class Checks:
    """Each method is a check; it raises if the server does something else than KServe's client needs."""

    def __init__(self, url: str, address: str) -> None:
        self.url = url
        self.rest = InferenceRESTClient(RESTConfig(protocol="v2", retries=0))
        self.grpc = InferenceGRPCClient(address, retries=0)

    async def rest_live_and_ready(self) -> None:
        assert await self.rest.is_server_live(self.url)
        assert await self.rest.is_server_ready(self.url)
        assert await self.rest.is_model_ready(self.url, "add_sub")

    async def rest_unknown_model_is_not_ready(self) -> None:
        assert not await self.rest.is_model_ready(self.url, "no_such_model")

    async def rest_json(self) -> None:
        answer = await self.rest.infer(self.url, request(False), model_name="add_sub")
        assert outputs(answer) == SUMS, answer

    async def rest_binary(self) -> None:
        answer = await self.rest.infer(self.url, request(True), model_name="add_sub")
        assert outputs(answer) == SUMS, answer

    async def rest_requested_output(self) -> None:
        wanted = [RequestedOutput("OUT1", {"binary_data": True})]
        answer = await self.rest.infer(self.url, request(True, request_outputs=wanted), model_name="add_sub")
        assert outputs(answer) == {"OUT1": SUMS["OUT1"]}, answer

    async def rest_words(self) -> None:
        given = InferInput("IN_BYTES", [2], "BYTES")
        given.set_data_from_numpy(np.array([b"one", b"two"], dtype=np.object_), binary_data=True)
        asked = InferRequest(model_name="types", infer_inputs=[given], request_outputs=[RequestedOutput("OUT_BYTES")])
        answer = await self.rest.infer(self.url, asked, model_name="types")
        assert [each if isinstance(each, bytes) else each.encode() for each in outputs(answer)["OUT_BYTES"]] == [
            b"one",
            b"two",
        ]

    async def rest_error(self) -> None:
        asked = request(False, model="no_such_model")
        assert "404" in await refusal(self.rest.infer(self.url, asked, model_name="no_such_model"))

    async def grpc_live_and_ready(self) -> None:
        assert await self.grpc.is_server_live()
        assert await self.grpc.is_server_ready()
        assert await self.grpc.is_model_ready("add_sub")

    async def grpc_infer(self) -> None:
        answer = await self.grpc.infer(request(True, request_id="seven"))
        assert outputs(answer) == SUMS, answer
        assert answer.id == "seven", answer.id

    async def grpc_error(self) -> None:
        assert "NOT_FOUND" in await refusal(self.grpc.infer(request(True, model="no_such_model")))


async def main(url: str, address: str) -> int:
    """Run all; returns the exit code."""
    checks = Checks(url, address)
    failed = 0
    for name in [each for each in vars(Checks) if not each.startswith("_")]:
        check: Callable[[], Awaitable[None]] = getattr(checks, name)
        try:
            await check()
        except Exception:
            failed += 1
            print(f"{name}: FAILED\n{traceback.format_exc()}")
        else:
            print(f"{name}: ok")
    await checks.grpc.close()
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(asyncio.run(main(sys.argv[1], sys.argv[2])))
