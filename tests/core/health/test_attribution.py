"""Whom an error hits, what a slice has of its GPU, and what a replica on several devices weighs."""

import pytest

from forebay.core.health import DeviceReading, devices_hit, inherited, lightest
from forebay.core.health.attribution import pci_of
from forebay.core.health.settings import HealthSettings, health_conflicts

GPU = DeviceReading("GPU-1", pci="00000000:3B:00.0", lost=True, temperature_c=80.0)
OTHER = DeviceReading("GPU-2", pci="00000000:5E:00.0")
ONE, TWO = (DeviceReading(f"MIG-{n}", parent="GPU-1", pci=GPU.pci) for n in (1, 2))
ALL = (GPU, OTHER, ONE, TWO)


@pytest.mark.parametrize(
    ("named", "whom"),
    [
        ("GPU-1", ("GPU-1", "MIG-1", "MIG-2")),
        ("PCI:0000:3b:00", ("GPU-1", "MIG-1", "MIG-2")),
        ("0000:5e:00", ("GPU-2",)),
        ("MIG-2", ("MIG-2",)),
        ("PCI:0000:aa:00", ()),
        ("GPU-9", ()),
    ],
)
def test_gpu_error_affects_all_its_slices_and_slice_error_only_the_slice(named: str, whom: tuple[str, ...]) -> None:
    assert devices_hit(named, ALL) == whom


def test_mig_slice_inherits_readings_of_its_gpu() -> None:
    seen = inherited(ONE, {"GPU-1": GPU})
    assert (seen.device, seen.lost, seen.temperature_c) == ("MIG-1", True, 80.0)
    assert inherited(GPU, {"GPU-1": GPU}) is GPU


def test_pci_address_is_recognised_in_every_notation() -> None:
    assert pci_of("PCI:0000:3b:00") == pci_of("00000000:3B:00.0") == (0, 0x3B, 0)
    assert pci_of("GPU-1") is None
    assert pci_of("1:2") is None


def test_weight_of_a_replica_is_that_of_its_slowest_device() -> None:
    assert lightest([]) == 1.0
    assert lightest([1.0, 0.4, 0.7]) == 0.4


def test_device_source_without_its_input_is_a_conflict() -> None:
    paths = [
        [conflict.path for conflict in health_conflicts({"health": health})]
        for health in ({"source": "scripted"}, {"source": "dcgm"}, {"source": "auto"}, "auto")
    ]
    assert paths == [["health.file"], ["health.exporters"], [], []]
    dcgm = {"source": "dcgm", "exporters": {"a": "http://a", "b": "http://b", "local": "http://c"}}
    for nodes, wrong in (([{"name": "a"}, {"name": "b"}], "local"), ([], "a")):
        found = [conflict.path for conflict in health_conflicts({"health": dcgm, "nodes": nodes})]
        assert f"health.exporters.{wrong}" in found
    assert HealthSettings(calm_s=7).rules().calm_s == 7
