"""Contradictions in nodes and placements, and the field that is named."""

from typing import Any

import pytest
from pydantic import ValidationError

from forebay.core.cluster import Cluster
from forebay.core.placement.settings import NodeSettings, PlacementSettings, cpu_list, placement_conflicts
from forebay.wire.clusterfile import ClusterFileError, load

GPU = {"kind": "A100", "memory_gib": 40}
SLICED = {"kind": "A100", "memory_gib": 40, "mig": [{"id": "MIG-1", "profile": "1g.5gb", "memory_gib": 5}]}


def raw(placement: object, *nodes: object) -> dict[str, Any]:
    return {"models": [{"name": "m", "task": "chat", "source": "x", "placement": placement}], "nodes": list(nodes)}


def found(placement: object, *nodes: object) -> list[tuple[str, str]]:
    return [(c.path, c.allowed) for c in placement_conflicts(raw(placement, *nodes))]


@pytest.mark.parametrize(
    ("text", "cpus"), [("0", (0,)), ("0-3,8", (0, 1, 2, 3, 8)), (" 4 , 2-3 ", (2, 3, 4)), ("4095", (4095,))]
)
def test_core_list_uses_the_linux_notation(text: str, cpus: tuple[int, ...]) -> None:
    assert cpu_list(text) == cpus
    assert NodeSettings(name="a", cpus=text).cpus == text


@pytest.mark.parametrize("text", ["", "a", "3-1", "1,,2", "4096", "-1", "0-", "1-2-3"])
def test_invalid_core_list_is_rejected(text: str) -> None:
    with pytest.raises(ValidationError, match="is not a list of cores such as 0-3,8"):
        NodeSettings(name="a", cpus=text)


def with_cores(written: str) -> str:
    return f"models: [{{name: m, task: chat, source: x}}]\nnodes:\n- name: a\n  cpus: {written}\n"


@pytest.mark.parametrize(
    ("written", "shown"),
    [("1", "1"), ("true", "true"), ("3-1", '"3-1"'), ('""', '""'), ("[0, 1]", "[0, 1]")],
)
def test_invalid_core_list_error_shows_value_and_format(written: str, shown: str) -> None:
    with pytest.raises(ClusterFileError) as refused:
        load(with_cores(written), "a.yaml")

    [problem] = refused.value.problems
    assert (problem.path, problem.found, problem.line) == ("nodes[0].cpus", shown, 4)
    assert '0-3,8 for five cores, "1" (with quotes) for core 1 alone' in problem.allowed


def test_core_list_is_read_from_the_cluster_file() -> None:
    assert [load(with_cores(text), "a.yaml").nodes[0].cpus for text in ("0-3,8", '"1"')] == ["0-3,8", "1"]


@pytest.mark.parametrize(
    ("placement", "nodes", "path", "allowed"),
    [
        ({"nodes": ["c"]}, [{"name": "a"}], "nodes", "names of `nodes`: a"),
        ({"nodes": ["a"]}, [], "nodes", "names of `nodes`: local"),
        (
            {"labels": ["eu"]},
            [{"name": "a", "labels": ["us"]}],
            "labels",
            "labels that at least one of its nodes has all of",
        ),
        (
            {"labels": ["eu"], "nodes": ["a"]},
            [{"name": "a"}, {"name": "b", "labels": ["eu"]}],
            "labels",
            "labels that at least one of its nodes has all of",
        ),
        (
            {},
            [{"name": "a", "role": "fallback"}],
            "low_priority",
            "`low_priority: true`, or a node with `role: serve`",
        ),
        ({"gpus": 2}, [{"name": "a", "gpus": [GPU]}], "gpus", "at most 1, the suitable GPUs of a"),
        ({"gpus": 1}, [{"name": "a", "gpus": []}], "gpus", "what nodes have; a has no GPU"),
        (
            {"gpus": 1, "gpu_kinds": ["H100"]},
            [{"name": "a", "gpus": [GPU, {"memory_gib": 8}]}],
            "gpu_kinds",
            "what nodes have; a has A100, GPUs of unspecified kind",
        ),
        ({"gpus": 2}, [{"name": "a", "gpus": [SLICED, GPU]}], "gpus", "at most 1, the suitable GPUs of a"),
        (
            {"gpus": 1, "mig": "2g.10gb"},
            [{"name": "a", "gpus": [SLICED]}],
            "mig",
            "a profile that a GPU is divided into; a has no such slice",
        ),
        (
            {"gpus": 1, "memory_gib": 6},
            [{"name": "a", "gpus": [SLICED]}],
            "memory_gib",
            "at most 5, the memory of the largest of its GPUs",
        ),
        (
            {"memory_gib": 6},
            [{"name": "a", "memory_gib": 4}, {"name": "b", "role": "fallback"}],
            "memory_gib",
            "at most 4, the memory of a",
        ),
        ({"cpus": 3}, [{"name": "a", "cpus": "0-1"}], "cpus", "at most 2, the cores of a"),
        ({"gpus": 1, "fraction": 0.5, "memory_gib": 3}, [], "fraction", "one of the two"),
        ({"fraction": 0.5}, [], "fraction", "this only with `gpus: 1` or more"),
        ({"linked": True}, [], "linked", "this only with `gpus: 1` or more"),
        ({"gpus": 2, "mig": "1g.5gb"}, [], "mig", "`gpus: 1`: slices cannot be combined"),
    ],
)
def test_impossible_placement_is_rejected_by_field(
    placement: dict[str, object], nodes: list[object], path: str, allowed: str
) -> None:
    assert found(placement, *nodes) == [(f"models[0].placement.{path}", allowed)]


@pytest.mark.parametrize(
    ("placement", "nodes"),
    [
        ({}, []),
        ({"gpus": 8}, []),  # what a source finds is not known beforehand
        ({"memory_gib": 500}, [{"name": "a"}]),
        ({"gpus": 2, "low_priority": True}, [{"name": "a", "role": "fallback"}]),
        ({"gpus": 1, "memory_gib": 5, "mig": "1g.5gb"}, [{"name": "a", "gpus": [SLICED]}]),
        ({"gpus": 2, "memory_gib": 40}, [{"name": "a", "gpus": [GPU]}, {"name": "b", "gpus": [GPU, GPU]}]),
        ({"cpus": 2}, [{"name": "a", "cpus": "0-1"}]),
        ({"gpus": "many"}, [{"name": "a"}]),  # others tell of that
        ({"nodes": ["b"]}, [{"name": "a"}, {"name": 5}]),
        ("nonsense", [5]),
    ],
)
def test_placement_that_may_fit_later_is_accepted(placement: object, nodes: list[object]) -> None:
    assert found(placement, *nodes) == []


def test_duplicate_node_names_and_device_ids_are_rejected() -> None:
    twice = [
        {"name": "a", "gpus": [{**GPU, "id": "GPU-1"}, {**GPU, "id": "GPU-1"}]},
        {"name": "a", "gpus": [{**GPU, "id": "GPU-1", "mig": SLICED["mig"]}, {**GPU, "mig": SLICED["mig"]}]},
    ]
    names = [(c.path, c.found) for c in placement_conflicts(raw({}, *twice))]
    assert names == [
        ("nodes[0].gpus[1]", 'the id "GPU-1", also that of nodes[0].gpus[0]'),
        ("nodes[1].name", '"a", also the name of nodes[0]'),
        ("nodes[1].gpus[0]", 'the id "GPU-1", also that of nodes[0].gpus[0]'),
        ("nodes[1].gpus[1].mig", 'the id "MIG-1", also that of nodes[1].gpus[0].mig'),
    ]


def test_cluster_with_nodes_is_validated_including_placement() -> None:
    cluster = Cluster.model_validate(raw({"gpus": 1}, {"name": "a", "gpus": [GPU]}))
    assert cluster.models[0].placement == PlacementSettings(gpus=1)
    with pytest.raises(ValidationError, match=r"models\[0\].placement.gpus"):
        Cluster.model_validate(raw({"gpus": 2}, {"name": "a", "gpus": [GPU]}))
