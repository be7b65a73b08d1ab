"""Placement of a model's instances on CPUs, memory nodes and GPUs."""

import json
from dataclasses import replace
from functools import partial
from pathlib import Path

from forebay.core.serving.config import InstanceGroup, InstanceKind, ModelConfig
from forebay.core.serving.ensemble import Lookup
from forebay.modelserver.models.context import ModelAccess, Source
from forebay.modelserver.models.life.machine import SYS, node_cpus
from forebay.modelserver.models.life.warmup import warm_up
from forebay.modelserver.models.options import Options
from forebay.modelserver.process.placement import ChildSpec, Placement
from forebay.modelserver.process.process import ModelProcess
from forebay.modelserver.repository import Described


def child_spec(own: Source, options: Options, models: ModelAccess) -> ChildSpec:
    """What the processes of a version are told. Raises `Refused` if a step of an ensemble is not loaded."""
    steps = [_told(models.source(step.model, step.version)) for step in own.config.steps]
    instances = placements(own.config, options)
    return replace(_told(own), instances=instances, rss_bytes_max=options.rss_bytes_max, steps=tuple(steps))


def as_one(described: Described, lookup: Lookup) -> Described:
    """An ensemble that runs its steps in processes of its own: its queue is that of its first step's model, and its
    instances are those of the first model that has a GPU, else of the same one."""
    config = described.config
    models = [model for step in config.steps if (model := lookup(step.model, step.version)) is not None]
    placed = next((model for model in models if any(map(_on_gpu, model.instances))), models[0])
    batching = models[0].batching
    if batching is not None:
        sizes = tuple([size for size in batching.preferred_sizes if size <= config.max_batch])
        batching = replace(batching, preferred_sizes=sizes)
    return replace(described, config=replace(config, batching=batching, instances=placed.instances))


def placements(config: ModelConfig, options: Options, sys: Path = SYS) -> tuple[Placement, ...]:
    """One placement per instance, in group order; `count` instances for each GPU of a group.

    Instances bound to a NUMA node run on the CPUs of that node unless the host policy names CPUs. GPU numbers of a
    group index the GPUs of its host policy, else those that the server sees.
    """
    return tuple(
        placement
        for group in config.instances
        for placement in _of_group(group, _near(options.hosts.get(group.host_policy, Placement()), sys), options.gpus)
    )


async def resize(process: ModelProcess, described: Described, config: ModelConfig, options: Options) -> None:
    """Give the process the instances of `config`; new ones are warmed up first. Raises `GaveUp`."""
    warmed = partial(warm_up, described.config, described.folder, options.strings_max)
    await process.set_instances(placements(config, options), warmed)


def _told(source: Source) -> ChildSpec:
    config = source.config
    return ChildSpec(config.backend, config, source.folder, document=json.dumps(source.document))


def _on_gpu(group: InstanceGroup) -> bool:
    return group.kind is InstanceKind.GPU


def _near(host: Placement, sys: Path) -> Placement:
    if host.numa_node < 0 or host.cpus:
        return host
    return replace(host, cpus=node_cpus(host.numa_node, sys))


def _of_group(group: InstanceGroup, host: Placement, gpus: tuple[str, ...]) -> tuple[Placement, ...]:
    if not _on_gpu(group) or not group.gpus:
        return (host,) * group.count
    names = dict(enumerate(host.gpus or gpus))
    named = [names.get(gpu, str(gpu)) for gpu in group.gpus]
    return tuple(replace(host, gpus=(name,)) for name in named for _ in range(group.count))
