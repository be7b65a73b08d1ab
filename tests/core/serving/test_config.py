"""What a configuration says of its instances."""

from forebay.core.serving.config import InstanceGroup, InstanceKind, ModelConfig


def test_instances_are_counted_group_by_group_and_gpu_by_gpu() -> None:
    few, gpus = InstanceGroup("few", count=2), InstanceGroup("gpus", InstanceKind.GPU, count=2, gpus=(0, 3))
    config = ModelConfig("m", "python", instances=(few, gpus))
    assert config.instance_count == 6
    assert [config.group_of(each).name for each in range(8)] == ["few"] * 2 + ["gpus"] * 6
