"""Where the instances of a model run."""

from dataclasses import replace

from forebay.core.serving.config import InstanceGroup, InstanceKind, ModelConfig
from forebay.modelserver.models.options import Options
from forebay.modelserver.process.values import Placement


def placements(config: ModelConfig, options: Options) -> tuple[Placement, ...]:
    """One for each instance, in the order of the groups; each GPU of a group has the group's count."""
    return tuple(
        placement
        for group in config.instances
        for placement in _of_group(group, options.hosts.get(group.host_policy, Placement()))
    )


def _of_group(group: InstanceGroup, host: Placement) -> tuple[Placement, ...]:
    if group.kind is not InstanceKind.GPU or not group.gpus:
        return (host,) * group.count
    return tuple(replace(host, gpus=(str(gpu),)) for gpu in group.gpus for _ in range(group.count))
