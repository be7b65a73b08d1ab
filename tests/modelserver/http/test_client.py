"""Triton's own HTTP client, unmodified, against the frontend."""

from typing import Any

import numpy as np
import pytest
from tests.modelserver.http.rig import rig
from tests.net.rig import run

aio = pytest.importorskip("tritonclient.http.aio")
utils = pytest.importorskip("tritonclient.utils")

ARRAYS = [
    np.array([True, False]),
    *(np.array([0, 1, 120], dtype) for dtype in ("u1", "u2", "u4", "u8", "i1", "i2", "i4", "i8", "f2", "f4", "f8")),
    np.array([[b"a", b""], [b"\xff\x00", "ä".encode()]], dtype=object),
    np.zeros((0, 3), "f4"),
]


@pytest.mark.parametrize("array", ARRAYS, ids=lambda array: str(array.dtype))
def test_every_datatype_round_trips_unchanged(array: Any) -> None:
    async def main() -> None:
        async with rig() as it, aio.InferenceServerClient(f"127.0.0.1:{it.server.port}") as client:
            datatype = utils.np_to_triton_dtype(array.dtype)
            for binary_in in (True, False):
                for binary_out in (True, False):
                    if not (binary_in and binary_out) and (datatype == "FP16" or (array.dtype == object)):
                        continue
                    given = aio.InferInput("IN", array.shape, datatype)
                    given.set_data_from_numpy(array, binary_data=binary_in)
                    wanted = aio.InferRequestedOutput("OUT", binary_data=binary_out)
                    result = await client.infer("echo", [given], outputs=[wanted], request_id="a")
                    assert np.array_equal(result.as_numpy("OUT"), array)
                    assert result.get_response()["id"] == "a"

    run(main())


def test_nan_and_infinity_round_trip_as_json() -> None:
    async def main() -> None:
        async with rig() as it, aio.InferenceServerClient(f"127.0.0.1:{it.server.port}") as client:
            array = np.array([np.nan, np.inf, -np.inf, 1.5], "f4")
            given = aio.InferInput("IN", array.shape, "FP32")
            given.set_data_from_numpy(array, binary_data=False)
            result = await client.infer("echo", [given], outputs=[aio.InferRequestedOutput("OUT", binary_data=False)])
            assert np.array_equal(result.as_numpy("OUT"), array, equal_nan=True)

    run(main())


def test_client_metadata_repository_and_settings_calls_succeed() -> None:
    async def main() -> None:
        async with rig() as it, aio.InferenceServerClient(f"127.0.0.1:{it.server.port}") as client:
            assert await client.is_server_live()
            assert await client.is_server_ready()
            assert await client.is_model_ready("echo", "1")
            assert not await client.is_model_ready("none")
            assert (await client.get_server_metadata())["name"] == "forebay"
            assert (await client.get_model_metadata("add"))["inputs"][0]["datatype"] == "FP32"
            assert (await client.get_model_config("add"))["max_batch_size"] == 8
            assert (await client.get_inference_statistics("echo"))["model_stats"][0]["name"] == "echo"
            assert (await client.get_model_repository_index())[0]["state"] == "READY"
            await client.load_model("m", config="{}", files={"file:1/model.onnx": b"bytes"})
            assert it.models.loads == [("m", {"config": "{}", "file:1/model.onnx": b"bytes"})]
            await client.unload_model("m", unload_dependents=True)
            assert it.models.unloads == [("m", True, "")]
            await client.register_system_shared_memory("r", "/k", 64)
            assert (await client.get_system_shared_memory_status())[0]["name"] == "r"
            await client.unregister_system_shared_memory()
            assert (await client.update_trace_settings(settings={"trace_rate": "2"}))["trace_rate"] == "2"
            assert (await client.update_log_settings({"log_info": False})) == {"log_info": False}
            with pytest.raises(utils.InferenceServerException, match="unknown model: 'none'"):
                await client.get_model_metadata("none")

    run(main())


@pytest.mark.parametrize("coding", ["gzip", "deflate"])
def test_client_request_and_response_compression(coding: str) -> None:
    async def main() -> None:
        async with rig() as it, aio.InferenceServerClient(f"127.0.0.1:{it.server.port}") as client:
            given = aio.InferInput("IN", [3], "INT32")
            given.set_data_from_numpy(np.arange(3, dtype="i4"))
            result = await client.infer(
                "echo", [given], request_compression_algorithm=coding, response_compression_algorithm=coding
            )
            assert result.as_numpy("OUT").tolist() == [0, 1, 2]

    run(main())
