"""Tiny models for the repositories of these tests."""

from pathlib import Path

from onnx import TensorProto, helper, save

SLOW = """
import time
import triton_python_backend_utils as pb

class TritonPythonModel:
    def execute(self, requests):
        time.sleep(0.01)
        arrays = [pb.get_input_tensor_by_name(request, "IN").as_numpy() for request in requests]
        return [pb.InferenceResponse([pb.Tensor("OUT", array)]) for array in arrays]
"""
COUNTING = """
import triton_python_backend_utils as pb

class TritonPythonModel:
    def initialize(self, args):
        counters = pb.MetricFamily(name="rows_seen", description="What came.", kind=pb.MetricFamily.COUNTER)
        ours = pb.MetricFamily(name="forebay_worker_running", description="Ours.", kind=pb.MetricFamily.GAUGE)
        self.seen, self.ours = counters.Metric(labels={"kind": "row"}), ours.Metric()

    def execute(self, requests):
        self.seen.increment(len(requests))
        arrays = [pb.get_input_tensor_by_name(request, "IN").as_numpy() for request in requests]
        return [pb.InferenceResponse([pb.Tensor("OUT", array)]) for array in arrays]
"""
ERRING = """
import triton_python_backend_utils as pb

class TritonPythonModel:
    def execute(self, requests):
        return [pb.InferenceResponse(error=pb.TritonError("no")) for _ in requests]
"""
CALLING = """
import triton_python_backend_utils as pb

class TritonPythonModel:
    def execute(self, requests):
        return [self.answer(request) for request in requests]

    def answer(self, request):
        given = [pb.get_input_tensor_by_name(request, "IN")]
        call = pb.InferenceRequest(model_name="double", requested_output_names=["OUT"], inputs=given)
        return pb.InferenceResponse([pb.get_output_tensor_by_name(call.exec(), "OUT")])
"""
IO = """
input { name: "IN" data_type: TYPE_FP32 dims: [4] }
output { name: "OUT" data_type: TYPE_FP32 dims: [4] }
"""


def double(repository: Path, name: str = "double") -> Path:
    """A model with OUT = IN + IN that batches; returns the repository."""
    folder = repository / name / "1"
    folder.mkdir(parents=True)
    onnx_file(folder / "model.onnx")
    (repository / name / "config.pbtxt").write_text("max_batch_size: 8\ndynamic_batching { }\n")
    return repository


def onnx_file(path: Path) -> Path:
    """The model alone."""
    x, y = (helper.make_tensor_value_info(name, TensorProto.FLOAT, ["n", 4]) for name in ("IN", "OUT"))
    graph = helper.make_graph([helper.make_node("Add", ["IN", "IN"], ["OUT"])], "double", [x], [y])
    save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10), path)
    return path


def python(repository: Path, name: str, code: str, more: str = "", io: str = IO) -> Path:
    """A model in Python; returns the repository."""
    folder = repository / name / "1"
    folder.mkdir(parents=True)
    (folder / "model.py").write_text(code)
    (repository / name / "config.pbtxt").write_text(f'backend: "python"\nmax_batch_size: 8\n{io}{more}')
    return repository
