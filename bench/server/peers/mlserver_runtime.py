"""MLServer's custom runtime with adaptive batching. Started by servers.py in an environment of its own."""

import os

from chain import Chain
from mlserver import MLModel
from mlserver.codecs import NumpyCodec
from mlserver.types import InferenceRequest, InferenceResponse


class Runtime(MLModel):
    """ONNX Runtime behind MLServer's own codecs."""

    async def load(self) -> bool:
        """Load the model."""
        self.chain = Chain(os.environ["BENCH_FILES"].split(os.pathsep))
        return True

    async def predict(self, payload: InferenceRequest) -> InferenceResponse:
        """Run a batch."""
        rows = NumpyCodec.decode_input(payload.inputs[0])
        found = self.chain.run({payload.inputs[0].name: rows})
        outputs = [NumpyCodec.encode_output(name, array) for name, array in zip(self.chain.names, found, strict=True)]
        return InferenceResponse(model_name=self.name, outputs=outputs)
