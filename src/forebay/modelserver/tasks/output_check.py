"""Checks model outputs against the task's contract: a response with too few rows must not look complete."""

from collections.abc import Sequence
from math import prod

from forebay.core.serving.config import ModelConfig
from forebay.core.serving.values import InferResponse, Tensor
from forebay.core.task_tensors import CONTRACTS, Contract, Output
from forebay.modelserver.tasks.contract import ContractViolation


class OutputCheck:
    """Checks the responses to a job, whose inferences have `rows` rows each."""

    __slots__ = ("_batched", "_contract", "_decoupled", "_given", "_rows")

    def __init__(self, task: str, config: ModelConfig, rows: Sequence[int]) -> None:
        self._contract = CONTRACTS.get(task)
        self._batched = config.max_batch > 0
        self._decoupled = config.decoupled
        self._rows = rows
        self._given = [0] * len(rows)

    def check(self, part: int, response: InferResponse) -> None:
        """Check one response to an inference. Raises `ContractViolation`."""
        contract = self._contract
        if contract is None or (self._decoupled and not response.outputs):
            return
        found = {tensor.name: tensor for tensor in response.outputs}
        for output in contract.outputs:
            tensor = found.get(output.name)
            if tensor is not None and tensor.datatype not in output.datatypes:
                raise ContractViolation(f"it gave '{output.name}' as {tensor.datatype}")
        if contract.by_row:
            self._given[part] += self._rows_of(contract, found)

    def end(self, part: int) -> None:
        """An inference has ended: check that it is complete. Raises `ContractViolation`."""
        contract = self._contract
        if contract is not None and contract.by_row and self._given[part] != self._rows[part]:
            name = contract.outputs[0].name
            raise ContractViolation(f"it gave {self._given[part]} rows of '{name}' for {self._rows[part]}")

    def _rows_of(self, contract: Contract, found: dict[str, Tensor]) -> int:
        """Number of rows of each output in a response. Raises `ContractViolation` if the outputs do not agree."""
        first = found.get(contract.outputs[0].name)
        if first is None:
            raise ContractViolation(f"it gave no '{contract.outputs[0].name}'")
        rows = self._count(contract.outputs[0], first)
        things = self._batched + 1
        for output in contract.outputs:
            tensor = found.get(output.name)
            if tensor is None:
                if output.optional:
                    continue
                raise ContractViolation(f"it gave no '{output.name}'")
            alike = not output.beside or tensor.shape[:things] == first.shape[:things]
            ends = not output.last or tensor.shape[-1] == output.last
            if self._count(output, tensor) != rows or not alike or not ends:
                sizes = f"of shape {list(tensor.shape)} beside '{first.name}' of shape {list(first.shape)}"
                raise ContractViolation(f"it gave '{output.name}' {sizes}")
        return rows

    def _count(self, output: Output, tensor: Tensor) -> int:
        if output.dims is None:
            return tensor.shape[0] if self._batched and tensor.shape else 1
        if len(tensor.shape) < output.dims:
            raise ContractViolation(f"it gave '{output.name}' of shape {list(tensor.shape)}")
        return prod(tensor.shape[: len(tensor.shape) - output.dims])
