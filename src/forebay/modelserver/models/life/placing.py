"""Placement of a model's instances on CPUs, memory nodes and GPUs."""

import json
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from forebay.core.serving.config import InstanceGroup, InstanceKind, ModelConfig
from forebay.modelserver.models.life.machine import SYS, node_cpus
from forebay.modelserver.models.life.warmup import warm_up
from forebay.modelserver.models.options import Options
from forebay.modelserver.process.placement import ChildSpec, Placement
from forebay.modelserver.process.process import ModelProcess
from forebay.modelserver.repository import Described


def child_spec(config: ModelConfig, folder: Path, document: Mapping[str, Any], options: Options) -> ChildSpec:
    """What the processes of a version are told; `folder` is the version's."""
    told = json.dumps(document)
    return ChildSpec(config.backend, config, folder, placements(config, options), options.rss_bytes_max, told)


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


def _near(host: Placement, sys: Path) -> Placement:
    if host.numa_node < 0 or host.cpus:
        return host
    return replace(host, cpus=node_cpus(host.numa_node, sys))


def _of_group(group: InstanceGroup, host: Placement, gpus: tuple[str, ...]) -> tuple[Placement, ...]:
    if group.kind is not InstanceKind.GPU or not group.gpus:
        return (host,) * group.count
    names = dict(enumerate(host.gpus or gpus))
    named = [names.get(gpu, str(gpu)) for gpu in group.gpus]
    return tuple(replace(host, gpus=(name,)) for name in named for _ in range(group.count))
