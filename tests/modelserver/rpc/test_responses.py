"""Hand-written response encoding: equal to what protobuf's own library would encode."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.modelserver.http.rig import FakeModels
from tritonclient.grpc import service_pb2 as pb

from forebay.core.serving.config import Datatype
from forebay.core.serving.errors import Refused
from forebay.core.serving.values import InferResponse, Tensor
from forebay.modelserver.rpc import responses
from forebay.modelserver.rpc.responses import Writer

words = st.text(max_size=200)
tensors = st.builds(
    Tensor,
    words,
    st.sampled_from(list(Datatype)),
    st.lists(st.integers(0, 2**40), max_size=3).map(tuple),
    st.binary(max_size=300) | st.binary(max_size=20_000).map(memoryview),
)
values = st.booleans() | st.integers(-(2**63), 2**63 - 1) | st.floats(allow_nan=False) | words
KINDS = {bool: "bool_param", int: "int64_param", float: "double_param", str: "string_param"}


def writer() -> Writer:
    shelf = FakeModels()
    return Writer(shelf, shelf.view("echo", ""), {})


@given(
    st.builds(
        InferResponse,
        words,
        words,
        words,
        st.lists(tensors, max_size=4).map(tuple),
        parameters=st.dictionaries(words, values),
    )
)
def test_encoded_response_parses_back_with_protobuf(response: InferResponse) -> None:
    found = pb.ModelInferResponse.FromString(writer().write(response))
    expected = pb.ModelInferResponse(model_name=response.model, model_version=response.version, id=response.id)
    for name, value in response.parameters.items():
        setattr(expected.parameters[name], KINDS[type(value)], value)
    for tensor in response.outputs:
        expected.outputs.add(name=tensor.name, datatype=tensor.datatype.value, shape=tensor.shape)
        expected.raw_output_contents.append(bytes(tensor.data))
    assert found == expected


def test_tensor_data_of_any_item_size_is_counted_in_bytes() -> None:
    data = memoryview(bytes(800)).cast("d")
    response = InferResponse("echo", "1", "", (Tensor("OUT", Datatype.FP64, (100,), data),))
    assert pb.ModelInferResponse.FromString(writer().write(response)).raw_output_contents[0] == bytes(800)


def test_response_over_the_grpc_size_limit_is_rejected_before_encoding() -> None:
    class Huge(bytes):
        def __len__(self) -> int:
            return responses.RAW_BYTES_MAX + 1

    response = InferResponse("echo", "1", "", (Tensor("OUT", Datatype.UINT8, (1,), Huge(b"x")),))
    with pytest.raises(Refused, match="exceeds gRPC's byte size limit 2147483647"):
        writer().write(response)
