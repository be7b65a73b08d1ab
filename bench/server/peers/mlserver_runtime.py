"""MLServer's custom runtime with adaptive batching. Started by servers.py in an environment of its own."""

import os

import onnxruntime
from mlserver import MLModel
from mlserver.codecs import NumpyCodec
from mlserver.types import InferenceRequest, InferenceResponse


class Runtime(MLModel):
    """ONNX Runtime behind MLServer's own codecs."""

    async def load(self) -> bool:
        """Load the model on one thread."""
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = options.inter_op_num_threads = 1
        options.add_session_config_entry("session.x64quantprecision", "1")  # as ours: the same numbers everywhere
        self.session = onnxruntime.InferenceSession(os.environ["BENCH_FILE"], options)
        self.names = [output.name for output in self.session.get_outputs()]
        return True

    async def predict(self, payload: InferenceRequest) -> InferenceResponse:
        """Run a batch."""
        rows = NumpyCodec.decode_input(payload.inputs[0])
        found = self.session.run(None, {payload.inputs[0].name: rows})
        outputs = [NumpyCodec.encode_output(name, array) for name, array in zip(self.names, found, strict=True)]
        return InferenceResponse(model_name=self.name, outputs=outputs)
