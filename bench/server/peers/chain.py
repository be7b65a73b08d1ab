"""ONNX files that run one after the other, each on what came before: a model, or the steps of one."""

from collections.abc import Mapping, Sequence
from typing import Any

import onnxruntime


class Chain:
    """Sessions on one thread."""

    def __init__(self, files: Sequence[str], *, pattern: bool = True) -> None:
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = options.inter_op_num_threads = 1
        options.add_session_config_entry("session.x64quantprecision", "1")  # as ours: the same numbers everywhere
        options.enable_mem_pattern = pattern
        sessions = [onnxruntime.InferenceSession(file, options) for file in files]
        self._parts = [
            (session, [each.name for each in session.get_inputs()], [each.name for each in session.get_outputs()])
            for session in sessions
        ]
        self.inputs = self._parts[0][1]
        self.names = self._parts[-1][2]
        """Of the outputs."""

    def run(self, given: Mapping[str, Any]) -> list[Any]:
        """The outputs of the last one."""
        values = dict(given)
        found: list[Any] = []
        for session, inputs, outputs in self._parts:
            found = session.run(None, {name: values[name] for name in inputs})
            values.update(zip(outputs, found, strict=True))
        return found
