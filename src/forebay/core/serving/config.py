"""The configuration of a served model as values: what `config.pbtxt` says, complete and checked.

Times are seconds, whatever unit the file has. `modelserver.repository` reads and writes the file's own form.
"""

from dataclasses import dataclass, field
from enum import StrEnum
from itertools import accumulate

TRUE = frozenset({"true", "1"})
"""Texts of parameters that are switches."""
VARIABLE = -1
"""A dimension of any size."""
CALLS = "forebay.calls"
"""A parameter of a model: the names of those that it calls, with commas between them."""


class Datatype(StrEnum):
    """Element types by their names in the protocol."""

    BOOL = "BOOL"
    UINT8 = "UINT8"
    UINT16 = "UINT16"
    UINT32 = "UINT32"
    UINT64 = "UINT64"
    INT8 = "INT8"
    INT16 = "INT16"
    INT32 = "INT32"
    INT64 = "INT64"
    FP16 = "FP16"
    FP32 = "FP32"
    FP64 = "FP64"
    BF16 = "BF16"
    BYTES = "BYTES"
    """Elements of any length: on the wire each has its length before it, 4 bytes little-endian."""


ELEMENT_BYTES = {
    Datatype.BOOL: 1, Datatype.UINT8: 1, Datatype.UINT16: 2, Datatype.UINT32: 4, Datatype.UINT64: 8,
    Datatype.INT8: 1, Datatype.INT16: 2, Datatype.INT32: 4, Datatype.INT64: 8,
    Datatype.FP16: 2, Datatype.FP32: 4, Datatype.FP64: 8, Datatype.BF16: 2,
}  # fmt: skip
"""Of all but BYTES."""


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """An input or output. `dims` are without the batch dimension if the model batches; -1 is any size."""

    name: str
    datatype: Datatype
    dims: tuple[int, ...]
    reshape: tuple[int, ...] | None = None
    """What the backend sees or gives instead of `dims`."""
    optional: bool = False
    allow_ragged: bool = False
    format: str = "FORMAT_NONE"
    label_file: str = ""


class BatchKind(StrEnum):
    """What a batch input says of its source, by the names of Triton's schema. Counts are of whole requests."""

    COUNT = "BATCH_ELEMENT_COUNT"
    ENDS = "BATCH_ACCUMULATED_ELEMENT_COUNT"
    BOUNDS = "BATCH_ACCUMULATED_ELEMENT_COUNT_WITH_ZERO"
    LARGEST = "BATCH_MAX_ELEMENT_COUNT_AS_SHAPE"
    """The shape is the largest count; the values are nothing."""
    SHAPES = "BATCH_ITEM_SHAPE"
    """A row for each row of each request."""
    SHAPES_FLAT = "BATCH_ITEM_SHAPE_FLATTEN"


@dataclass(frozen=True, slots=True)
class BatchInput:
    """Inputs that no client gives: they tell the model of what its batch is made, from the input `source`."""

    kind: BatchKind
    targets: tuple[str, ...]
    datatype: Datatype
    source: str


@dataclass(frozen=True, slots=True)
class BatchOutput:
    """Outputs that lie one behind the other, each as large as the request's input `source` says."""

    targets: tuple[str, ...]
    source: str


class TimeoutAction(StrEnum):
    """What happens to a request that has waited for longer than its queue's timeout."""

    REJECT = "REJECT"
    DELAY = "DELAY"
    """It is served after all others of its level that are not late."""


@dataclass(frozen=True, slots=True)
class QueuePolicy:
    """How a priority level queues. `timeout_s` 0: none; `queue_max` 0: unbounded by this level."""

    timeout_action: TimeoutAction = TimeoutAction.REJECT
    timeout_s: float = 0.0
    allow_override: bool = False
    """A request's own timeout counts, if it is shorter than `timeout_s`."""
    queue_max: int = 0


@dataclass(frozen=True, slots=True)
class DynamicBatching:
    """Requests are put together. `levels` 0: no priorities; else 1 (highest) to `levels`, 0 stands for the default.

    `age_step_s` is ours: after each such time a waiting request counts as one level higher, so that none starves.
    0 is Triton's strict order.
    """

    preferred_sizes: tuple[int, ...] = ()
    delay_s: float = 0.0
    preserve_ordering: bool = False
    levels: int = 0
    default_level: int = 0
    default_policy: QueuePolicy = QueuePolicy()
    policies: dict[int, QueuePolicy] = field(default_factory=dict)
    age_step_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Control:
    """A control input of a sequence: `kind` START, END, READY or CORRID; values for false and true."""

    tensor: str
    kind: str
    datatype: Datatype
    false_true: tuple[float, float] = (0, 1)


@dataclass(frozen=True, slots=True)
class State:
    """Implicit state of a sequence: an output that comes back as an input of its next request."""

    input: str
    output: str
    datatype: Datatype
    dims: tuple[int, ...]
    initial_file: str = ""
    """In the folder `initial_state`; empty: zeros."""
    initial_dims: tuple[int, ...] = ()
    """Of the initial state, all known; empty: `dims`, with 1 for those that are not."""


@dataclass(frozen=True, slots=True)
class SequenceBatching:
    """Requests of one sequence go to one instance, one after the other. `oldest` False is the direct strategy."""

    idle_max_s: float = 1.0
    oldest: bool = False
    controls: tuple[Control, ...] = ()
    states: tuple[State, ...] = ()
    delay_s: float = 0.0
    minimum_slot_utilization: float = 0.0
    preferred_sizes: tuple[int, ...] = ()
    candidates_max: int = 0
    """Oldest: sequences that have a slot at once; 0: as many as a batch has rows."""
    preserve_ordering: bool = False
    iterative: bool = False


@dataclass(frozen=True, slots=True)
class Step:
    """One model of an ensemble. The maps go from the model's tensor names to names within the ensemble."""

    model: str
    version: int
    """-1: the latest."""
    inputs: dict[str, str]
    outputs: dict[str, str]


class InstanceKind(StrEnum):
    """Where instances run."""

    AUTO = "KIND_AUTO"
    CPU = "KIND_CPU"
    GPU = "KIND_GPU"
    MODEL = "KIND_MODEL"


@dataclass(frozen=True, slots=True)
class Resource:
    """Something that instances need to run; `is_global` ones are shared by all devices."""

    name: str
    count: int
    is_global: bool = False


@dataclass(frozen=True, slots=True)
class InstanceGroup:
    """Instances that are alike."""

    name: str = ""
    kind: InstanceKind = InstanceKind.CPU
    count: int = 1
    gpus: tuple[int, ...] = ()
    passive: bool = False
    host_policy: str = ""
    resources: tuple[Resource, ...] = ()
    priority: int = 0
    """Of the rate limiter: level p gets 1/p of the chances; 0 is 1."""


class VersionRule(StrEnum):
    """Which versions in a model's folder are served."""

    LATEST = "latest"
    ALL = "all"
    SPECIFIC = "specific"


@dataclass(frozen=True, slots=True)
class VersionPolicy:
    """`count` belongs to LATEST, `versions` to SPECIFIC."""

    rule: VersionRule = VersionRule.LATEST
    count: int = 1
    versions: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class WarmupInput:
    """One input of a warm-up request: zeros, random values, or the bytes of a file in the folder `warmup`."""

    datatype: Datatype
    dims: tuple[int, ...]
    fill: str = "zero"
    """`zero`, `random`, or `file`."""
    file: str = ""


@dataclass(frozen=True, slots=True)
class Warmup:
    """Requests that a model must have answered before it is ready. `count` 0 is once."""

    name: str
    batch_size: int
    inputs: dict[str, WarmupInput]
    count: int = 0


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """Everything that is known of a model before it is loaded. `max_batch` 0: the model does not batch."""

    name: str
    backend: str
    """`onnxruntime`, `openvino`, `pytorch`, `python`, `ensemble`."""
    platform: str = ""
    max_batch: int = 0
    inputs: tuple[TensorSpec, ...] = ()
    outputs: tuple[TensorSpec, ...] = ()
    batch_inputs: tuple[BatchInput, ...] = ()
    batch_outputs: tuple[BatchOutput, ...] = ()
    versions: VersionPolicy = VersionPolicy()
    instances: tuple[InstanceGroup, ...] = (InstanceGroup(),)
    batching: DynamicBatching | None = None
    sequences: SequenceBatching | None = None
    steps: tuple[Step, ...] = ()
    inflight_max: int = 0
    """Of an ensemble: requests within each step at once; 0: any number."""
    parameters: dict[str, str] = field(default_factory=dict)
    model_file: str = ""
    """`default_model_filename`; empty: what the backend is used to."""
    warmups: tuple[Warmup, ...] = ()
    cache: bool = False
    decoupled: bool = False
    """A request may have any number of responses."""

    @property
    def instance_count(self) -> int:
        """Instances of all groups together (a GPU group has its count on each GPU)."""
        return sum(group.count * max(1, len(group.gpus)) for group in self.instances)

    def group_of(self, instance: int) -> InstanceGroup:
        """The group that an instance is of, counted in the order of the groups; of one beyond all, the last."""
        ends = accumulate(group.count * max(1, len(group.gpus)) for group in self.instances)
        return next(
            (group for group, end in zip(self.instances, ends, strict=True) if instance < end), self.instances[-1]
        )

    @property
    def calls(self) -> tuple[str, ...]:
        """The other models that it says it calls."""
        names = (name.strip() for name in self.parameters.get(CALLS, "").split(","))
        return tuple(dict.fromkeys(name for name in names if name not in ("", self.name)))

    @property
    def needs(self) -> tuple[str, ...]:
        """The models without which it is not served: those of its steps, and those that it calls."""
        return tuple(dict.fromkeys((*(step.model for step in self.steps), *self.calls)))

    def says(self, parameter: str) -> bool:
        """Whether a parameter is true; one that is not there is not."""
        return self.parameters.get(parameter, "").lower() in TRUE

    @property
    def made_inputs(self) -> tuple[str, ...]:
        """Names of the inputs that are made of others for each batch."""
        return tuple(target for each in self.batch_inputs for target in each.targets)

    @property
    def scattered(self) -> dict[str, str]:
        """Outputs that are taken apart by the shapes of an input, with the name of that."""
        return {target: each.source for each in self.batch_outputs for target in each.targets}

    def input(self, name: str) -> TensorSpec | None:
        """The input of that name."""
        return next((spec for spec in self.inputs if spec.name == name), None)

    def output(self, name: str) -> TensorSpec | None:
        """The output of that name."""
        return next((spec for spec in self.outputs if spec.name == name), None)
