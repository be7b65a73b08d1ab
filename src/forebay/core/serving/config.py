"""The configuration of a served model as values: the content of `config.pbtxt`, completed and validated.

Times are seconds, whatever unit the file uses. `modelserver.repository` reads and writes the file format.
"""

from dataclasses import dataclass, field
from enum import StrEnum
from itertools import accumulate

TRUE = frozenset({"true", "1", "on"})
"""Values that mean "true" for boolean parameters."""
VARIABLE = -1
"""A dimension of any size."""
CALLS = "forebay.calls"
"""A model parameter: comma-separated names of the models that it calls."""
IN_PROCESS = "forebay.in_process"
"""A parameter of an ensemble: `true` runs the models of its steps in processes of the ensemble's own."""
MICRO_BATCH = "forebay.micro_batch_rows"
"""A model parameter: rows of a batch that run at once on a CPU; 0: all; missing: as many as is fastest."""


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
    """Elements of any length; on the wire each is preceded by its length, 4 bytes little-endian."""


ELEMENT_BYTES = {
    Datatype.BOOL: 1, Datatype.UINT8: 1, Datatype.UINT16: 2, Datatype.UINT32: 4, Datatype.UINT64: 8,
    Datatype.INT8: 1, Datatype.INT16: 2, Datatype.INT32: 4, Datatype.INT64: 8,
    Datatype.FP16: 2, Datatype.FP32: 4, Datatype.FP64: 8, Datatype.BF16: 2,
}  # fmt: skip
"""Element sizes, except for BYTES."""


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """An input or output. `dims` exclude the batch dimension if the model batches; -1 is any size."""

    name: str
    datatype: Datatype
    dims: tuple[int, ...]
    reshape: tuple[int, ...] | None = None
    """The dims that the backend sees instead of `dims`."""
    optional: bool = False
    allow_ragged: bool = False
    format: str = "FORMAT_NONE"
    label_file: str = ""


class BatchKind(StrEnum):
    """What a batch input contains about its source, named as in Triton's schema. Counts are of whole requests."""

    COUNT = "BATCH_ELEMENT_COUNT"
    ENDS = "BATCH_ACCUMULATED_ELEMENT_COUNT"
    BOUNDS = "BATCH_ACCUMULATED_ELEMENT_COUNT_WITH_ZERO"
    LARGEST = "BATCH_MAX_ELEMENT_COUNT_AS_SHAPE"
    """The shape is the largest count; the values are unused."""
    SHAPES = "BATCH_ITEM_SHAPE"
    """One row per row of each request."""
    SHAPES_FLAT = "BATCH_ITEM_SHAPE_FLATTEN"


@dataclass(frozen=True, slots=True)
class BatchInput:
    """Inputs that no client sends: they describe the batch to the model, derived from the input `source`."""

    kind: BatchKind
    targets: tuple[str, ...]
    datatype: Datatype
    source: str


@dataclass(frozen=True, slots=True)
class BatchOutput:
    """Outputs of a whole batch, concatenated; each request's part is as large as its input `source` says."""

    targets: tuple[str, ...]
    source: str


class TimeoutAction(StrEnum):
    """What happens to a request that exceeded its queue timeout."""

    REJECT = "REJECT"
    DELAY = "DELAY"
    """It is served after all others of its level that have not timed out."""


@dataclass(frozen=True, slots=True)
class QueuePolicy:
    """Queue policy of a priority level. `timeout_s` 0: none; `queue_max` 0: not limited by this level."""

    timeout_action: TimeoutAction = TimeoutAction.REJECT
    timeout_s: float = 0.0
    allow_override: bool = False
    """A request's own timeout applies if it is shorter than `timeout_s`."""
    queue_max: int = 0


@dataclass(frozen=True, slots=True)
class DynamicBatching:
    """Dynamic batching. `levels` 0: no priorities; else 1 (highest) to `levels`, where 0 stands for the default.

    `age_step_s` is a Forebay extension: after each such time a queued request counts as one level higher, so that
    none starves. 0 is Triton's strict order.
    """

    preferred_sizes: tuple[int, ...] = ()
    delay_s: float = 0.0
    preserve_ordering: bool = False
    levels: int = 0
    default_level: int = 0
    default_policy: QueuePolicy = QueuePolicy()
    policies: dict[int, QueuePolicy] = field(default_factory=dict)
    age_step_s: float = 0.0

    @property
    def has_policy(self) -> bool:
        """Whether requests may be overtaken, time out or be too many: they stay in the queue until they run."""
        policy = self.default_policy
        return bool(self.levels or policy.timeout_s or policy.allow_override or policy.queue_max)


@dataclass(frozen=True, slots=True)
class Control:
    """A control input of a sequence: `kind` START, END, READY or CORRID; values for false and true."""

    tensor: str
    kind: str
    datatype: Datatype
    false_true: tuple[float, float] = (0, 1)


@dataclass(frozen=True, slots=True)
class State:
    """Implicit state of a sequence: an output that is fed back as an input of its next request."""

    input: str
    output: str
    datatype: Datatype
    dims: tuple[int, ...]
    initial_file: str = ""
    """In the folder `initial_state`; empty: zeros."""
    initial_dims: tuple[int, ...] = ()
    """Dims of the initial state, all known; empty: `dims`, with 1 for the unknown ones."""


@dataclass(frozen=True, slots=True)
class SequenceBatching:
    """Requests of a sequence go to one instance, one after the other. `oldest` False is the direct strategy."""

    idle_max_s: float = 1.0
    oldest: bool = False
    controls: tuple[Control, ...] = ()
    states: tuple[State, ...] = ()
    delay_s: float = 0.0
    minimum_slot_utilization: float = 0.0
    preferred_sizes: tuple[int, ...] = ()
    candidates_max: int = 0
    """Oldest: sequences that have a slot at the same time; 0: as many as a batch has rows."""
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
    """A group of identical instances."""

    name: str = ""
    kind: InstanceKind = InstanceKind.CPU
    count: int = 1
    gpus: tuple[int, ...] = ()
    passive: bool = False
    host_policy: str = ""
    resources: tuple[Resource, ...] = ()
    priority: int = 0
    """Rate limiter priority: level p gets 1/p of the turns; 0 means 1."""


class VersionRule(StrEnum):
    """Which versions in a model's folder are served."""

    LATEST = "latest"
    ALL = "all"
    SPECIFIC = "specific"


@dataclass(frozen=True, slots=True)
class VersionPolicy:
    """`count` applies to LATEST, `versions` to SPECIFIC."""

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
    """Requests that a model must answer before it is ready. `count` 0 means once."""

    name: str
    batch_size: int
    inputs: dict[str, WarmupInput]
    count: int = 0


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """Everything that is known about a model before it is loaded. `max_batch` 0: the model does not batch."""

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
    """For an ensemble: concurrent requests within each step; 0: unlimited."""
    parameters: dict[str, str] = field(default_factory=dict)
    model_file: str = ""
    """`default_model_filename`; empty: the backend's default."""
    warmups: tuple[Warmup, ...] = ()
    cache: bool = False
    decoupled: bool = False
    """A request may have any number of responses."""
    graph_level: int = 0
    """`optimization.graph.level`, which ONNX models take: -1, 1 or 2; others mean all optimisations."""

    @property
    def instance_count(self) -> int:
        """Instances of all groups together (a GPU group has its count on each GPU)."""
        return sum(group.count * max(1, len(group.gpus)) for group in self.instances)

    def group_of(self, instance: int) -> InstanceGroup:
        """The group of an instance, numbered in the order of the groups; beyond the last instance, the last group."""
        ends = accumulate(group.count * max(1, len(group.gpus)) for group in self.instances)
        return next(
            (group for group, end in zip(self.instances, ends, strict=True) if instance < end), self.instances[-1]
        )

    @property
    def calls(self) -> tuple[str, ...]:
        """The other models that it declares to call."""
        names = (name.strip() for name in self.parameters.get(CALLS, "").split(","))
        return tuple(dict.fromkeys(name for name in names if name not in ("", self.name)))

    @property
    def needs(self) -> tuple[str, ...]:
        """The models it depends on: those of its steps, and those that it calls."""
        return tuple(dict.fromkeys((*(step.model for step in self.steps), *self.calls)))

    @property
    def in_process(self) -> bool:
        """Whether it is an ensemble that runs its steps in processes of its own, batch by batch."""
        return bool(self.steps) and self.says(IN_PROCESS)

    def says(self, parameter: str, *, default: bool = False) -> bool:
        """Whether a boolean parameter is true; a missing one is `default`."""
        return self.parameters.get(parameter, str(default)).lower() in TRUE

    @property
    def made_inputs(self) -> tuple[str, ...]:
        """Names of the inputs that are derived from others for each batch."""
        return tuple(target for each in self.batch_inputs for target in each.targets)

    @property
    def bf16_inputs(self) -> frozenset[str]:
        """Names of the inputs of BF16, of sequence states too: their bits do not tell them from UINT16."""
        states = self.sequences.states if self.sequences else ()
        fed = [(spec.name, spec.datatype) for spec in self.inputs]
        fed += [(state.input, state.datatype) for state in states]
        return frozenset(name for name, datatype in fed if datatype is Datatype.BF16)

    @property
    def output_datatypes(self) -> dict[str, Datatype]:
        """The datatypes of the outputs, and of sequence states."""
        states = self.sequences.states if self.sequences else ()
        told = {state.output: state.datatype for state in states}
        return told | {spec.name: spec.datatype for spec in self.outputs}

    @property
    def scattered(self) -> dict[str, str]:
        """Outputs that are split by the shapes of an input, with that input's name."""
        return {target: each.source for each in self.batch_outputs for target in each.targets}

    def input(self, name: str) -> TensorSpec | None:
        """The input of that name."""
        return next((spec for spec in self.inputs if spec.name == name), None)

    def output(self, name: str) -> TensorSpec | None:
        """The output of that name."""
        return next((spec for spec in self.outputs if spec.name == name), None)
