"""The configuration that Python models get, a JSON document in Triton's terms, and what they change in it."""

import json
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Final

from forebay.core.serving.config import (
    BatchInput,
    Datatype,
    DynamicBatching,
    InstanceGroup,
    SequenceBatching,
    TensorSpec,
    VersionPolicy,
    VersionRule,
)
from forebay.core.serving.config import ModelConfig as Values

FILE_DEFAULT: Final = "model.py"
SCATTER: Final = "BATCH_SCATTER_WITH_INPUT_SHAPE"
_US: Final = 1_000_000
_OPTIMIZATION: Final = {
    "priority": "PRIORITY_DEFAULT",
    "input_pinned_memory": {"enable": True},
    "output_pinned_memory": {"enable": True},
    "gather_kernel_buffer_threshold": 0,
    "eager_batching": False,
}
"""Triton's defaults."""
_KINDS_OF_TENSOR: Final = ("input", "output")
_COMPLETED: Final = ("max_batch_size", *_KINDS_OF_TENSOR, "model_transaction_policy", "default_model_filename")
"""Fields that the model or the server may have completed; taken from the values."""
_DYNAMIC: Final = frozenset(
    (
        "preferred_batch_size",
        "max_queue_delay_microseconds",
        "preserve_ordering",
        "priority_levels",
        "default_priority_level",
    )
)
"""Settings of dynamic batching that a model may complete."""


class ModelConfig:
    """The argument and result of `auto_complete_config`. Raises `ValueError` for contradictions to the file."""

    def __init__(self, model_config: str) -> None:
        self._model_config: dict[str, Any] = json.loads(model_config)

    def as_dict(self) -> dict[str, Any]:
        """The current configuration."""
        return self._model_config

    def set_max_batch_size(self, max_batch_size: int) -> None:
        """Enable batching; not with a smaller size than in the file."""
        said = self._model_config["max_batch_size"]
        if said > max_batch_size:
            raise ValueError(
                f"configuration specified max_batch_size {said}, but in auto-complete-config function for model "
                f"'{self._name}' specified max_batch_size {max_batch_size}"
            )
        self._model_config["max_batch_size"] = max_batch_size

    def set_dynamic_batching(self) -> None:
        """Enable dynamic batching unless another scheduler is configured."""
        for other in ("sequence_batching", "ensemble_scheduling"):
            if other in self._model_config:
                raise ValueError(
                    f"Configuration specified scheduling_choice as '{other}', but auto-complete-config function for "
                    f"model '{self._name}' tries to set scheduling_choice as 'dynamic_batching'"
                )
        self._model_config.setdefault("dynamic_batching", {})

    def add_input(self, input: dict[str, Any]) -> None:
        """Describe an input: `name`, `data_type`, `dims`, optionally `optional`."""
        self._add(
            "input", input, ("name", "data_type", "dims", "optional"), "'name', 'data_type', 'dims' and 'optional'"
        )

    def add_output(self, output: dict[str, Any]) -> None:
        """Describe an output: `name`, `data_type`, `dims`."""
        self._add("output", output, ("name", "data_type", "dims"), "'name', 'data_type' and 'dims'")

    def set_model_transaction_policy(self, transaction_policy_dict: dict[str, Any]) -> None:
        """Set with `decoupled` whether a request may have any number of responses."""
        if set(transaction_policy_dict) - {"decoupled"}:
            raise ValueError(
                f"model transaction property in auto-complete-config function for model '{self._name}' contains "
                "property other than 'decoupled'."
            )
        policy = self._model_config.setdefault("model_transaction_policy", {})
        for key, value in transaction_policy_dict.items():
            if policy.get(key, value) != value:
                raise ValueError(
                    f"trying to change decoupled property in auto-complete-config for model '{self._name}', which is "
                    f"already set to '{policy[key]}'."
                )
            policy[key] = value

    @property
    def _name(self) -> str:
        return str(self._model_config["name"])

    def _add(self, kind: str, tensor: dict[str, Any], known: tuple[str, ...], listed: str) -> None:
        where = f"in auto-complete-config function for model '{self._name}'"
        if set(tensor) - set(known):
            raise ValueError(f"{kind} '{tensor.get('name')}' {where} contains property other than {listed}.")
        if "name" not in tensor:
            raise ValueError(f"{kind} {where} is missing 'name' property.")
        for needed in ("data_type", "dims"):
            if needed not in tensor:
                raise ValueError(f"{kind} '{tensor['name']}' {where} is missing '{needed}' property.")
        said = next((each for each in self._model_config[kind] if each["name"] == tensor["name"]), None)
        if said is None:
            self._model_config[kind].append(tensor)
            return
        if said["data_type"] not in ("TYPE_INVALID", tensor["data_type"]):
            raise ValueError(
                f"unable to load model '{self._name}', configuration expects datatype {said['data_type']} for {kind} "
                f"'{tensor['name']}', model provides {tensor['data_type']}"
            )
        for key in ("dims", "optional"):
            if key in tensor and said.get(key) not in (None, [], tensor[key]):
                raise ValueError(
                    f"model '{self._name}', tensor '{tensor['name']}': the model expects {key} {tensor[key]} but the "
                    f"model configuration specifies {key} {said[key]}"
                )
        said.update(tensor)


def document(config: Values, told: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """The configuration in Triton's terms, as in `args["model_config"]`.

    `told` is the document that clients see, including fields without effect here; without it, the document is built
    from the values.
    """
    shown: dict[str, Any] = {
        "name": config.name,
        "platform": config.platform,
        "backend": config.backend,
        "runtime": "",
        "version_policy": _versions(config.versions),
        "max_batch_size": config.max_batch,
        "input": [_tensor(spec, True) for spec in config.inputs],
        "output": [_tensor(spec, False) for spec in config.outputs],
        "batch_input": [_batch_input(each) for each in config.batch_inputs],
        "batch_output": [
            {"target_name": list(each.targets), "kind": SCATTER, "source_input": [each.source]}
            for each in config.batch_outputs
        ],
        "optimization": _OPTIMIZATION,
        "instance_group": [_group(config, place, group) for place, group in enumerate(config.instances)],
        "default_model_filename": config.model_file or FILE_DEFAULT,
        "cc_model_filenames": {},
        "metric_tags": {},
        "parameters": {key: {"string_value": value} for key, value in sorted(config.parameters.items())},
        "model_warmup": [],
    }
    if config.batching:
        shown["dynamic_batching"] = _dynamic(config.batching, config.max_batch)
    if config.sequences:
        shown["sequence_batching"] = _sequences(config.sequences)
    if config.decoupled:
        shown["model_transaction_policy"] = {"decoupled": True}
    if told is not None:
        return {**shown, **told, **{key: shown[key] for key in _COMPLETED if key in shown}}
    return shown


def completed(config: Values, shown: Mapping[str, Any]) -> Values:
    """The configuration with the changes that the model made to its document. Raises `KeyError` and `ValueError`."""
    inputs, outputs = (tuple(_spec(each) for each in shown.get(kind, ())) for kind in _KINDS_OF_TENSOR)
    known = {spec.name: spec for spec in (*config.inputs, *config.outputs)}
    batching = config.batching
    if batching is None and "dynamic_batching" in shown:
        batching = _batching(shown["dynamic_batching"])
    if config.sequences is None and shown.get("sequence_batching") is not None:
        raise ValueError("auto_complete_config: sequence_batching can only be set in config.pbtxt")
    return replace(
        config,
        max_batch=int(shown["max_batch_size"]),
        inputs=tuple(_merged(known.get(spec.name), spec) for spec in inputs),
        outputs=tuple(_merged(known.get(spec.name), spec) for spec in outputs),
        batching=batching,
        decoupled=bool(shown.get("model_transaction_policy", {}).get("decoupled", False)),
    )


def instance_name(config: Values, instance: int) -> str:
    """Triton's name of an instance: its group's name (default: `<model>_<group>`) and its number.

    Those that are added beyond the configuration that the process knows get names of their own.
    """
    number = instance
    for place, group in enumerate(config.instances):
        count = group.count * max(1, len(group.gpus))
        if number < count:
            return f"{group.name or f'{config.name}_{place}'}_{number}"
        number -= count
    return f"{config.name}_0_{instance}"


def _merged(known: TensorSpec | None, spec: TensorSpec) -> TensorSpec:
    if known is None:
        return spec
    return replace(known, datatype=spec.datatype, dims=spec.dims, optional=spec.optional)


def _spec(shown: Mapping[str, Any]) -> TensorSpec:
    kind = str(shown["data_type"]).removeprefix("TYPE_")
    datatype = Datatype.BYTES if kind == "STRING" else Datatype(kind)
    dims = tuple(int(size) for size in shown["dims"])
    return TensorSpec(str(shown["name"]), datatype, dims, optional=bool(shown.get("optional", False)))


def _tensor(spec: TensorSpec, is_input: bool) -> dict[str, Any]:
    kind = "STRING" if spec.datatype is Datatype.BYTES else spec.datatype
    shown: dict[str, Any] = {"name": spec.name, "data_type": f"TYPE_{kind}", "dims": list(spec.dims)}
    if spec.reshape is not None:
        shown["reshape"] = {"shape": list(spec.reshape)}
    if is_input:
        shown |= {
            "format": spec.format,
            "is_shape_tensor": False,
            "allow_ragged_batch": spec.allow_ragged,
            "optional": spec.optional,
            "is_non_linear_format_io": False,
        }
    else:
        shown |= {"label_filename": spec.label_file, "is_shape_tensor": False, "is_non_linear_format_io": False}
    return shown


def _batch_input(given: BatchInput) -> dict[str, Any]:
    return {
        "kind": str(given.kind),
        "target_name": list(given.targets),
        "data_type": f"TYPE_{given.datatype}",
        "source_input": [given.source],
    }


def _versions(policy: VersionPolicy) -> dict[str, Any]:
    match policy.rule:
        case VersionRule.ALL:
            return {"all": {}}
        case VersionRule.SPECIFIC:
            return {"specific": {"versions": list(policy.versions)}}
        case VersionRule.LATEST:
            return {"latest": {"num_versions": policy.count}}


def _group(config: Values, place: int, group: InstanceGroup) -> dict[str, Any]:
    return {
        "name": group.name or f"{config.name}_{place}",
        "kind": str(group.kind),
        "count": group.count,
        "gpus": list(group.gpus),
        "secondary_devices": [],
        "profile": [],
        "passive": group.passive,
        "host_policy": group.host_policy,
    }


def _dynamic(batching: DynamicBatching, max_batch: int) -> dict[str, Any]:
    return {
        "preferred_batch_size": list(batching.preferred_sizes) or [max_batch] * (max_batch > 0),
        "max_queue_delay_microseconds": round(batching.delay_s * _US),
        "preserve_ordering": batching.preserve_ordering,
        "priority_levels": batching.levels,
        "default_priority_level": batching.default_level,
        "priority_queue_policy": {},
    }


def _batching(shown: Mapping[str, Any]) -> DynamicBatching:
    """The inverse of `_dynamic`. Raises `ValueError` for settings that a model cannot complete."""
    given = {key for key, value in shown.items() if value not in ({}, None)}
    others = sorted(given - _DYNAMIC)
    if others:
        raise ValueError(f"auto_complete_config: dynamic_batching has {others}, which only config.pbtxt can set")
    return DynamicBatching(
        preferred_sizes=tuple(sorted({int(size) for size in shown.get("preferred_batch_size", ())})),
        delay_s=int(shown.get("max_queue_delay_microseconds", 0)) / _US,
        preserve_ordering=bool(shown.get("preserve_ordering", False)),
        levels=int(shown.get("priority_levels", 0)),
        default_level=int(shown.get("default_priority_level", 0)),
    )


def _sequences(sequences: SequenceBatching) -> dict[str, Any]:
    strategy: dict[str, Any] = {"direct": {}}
    if sequences.oldest:
        strategy = {"oldest": {"max_candidate_sequences": sequences.candidates_max}}
    return {
        **strategy,
        "max_sequence_idle_microseconds": round(sequences.idle_max_s * _US),
        "iterative_sequence": sequences.iterative,
    }
