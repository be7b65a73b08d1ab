"""`scale:` in the cluster file."""

import pytest
import yaml

from forebay.core.cluster import Cluster
from forebay.core.scaling.settings import Limit, Pace, Policy, Scale, Signal, scale_conflicts
from forebay.wire.clusterfile import ClusterFileError, load

MODEL = "{name: chat, task: chat, source: a.gguf"


def scale(text: str, more: str = "") -> Scale:
    found = load(f"models: [{MODEL}{more}, scale: {text}}}]", "f.yaml").models[0].scaling()
    assert found
    return found


def conflicts(text: str) -> dict[str, str]:
    found = scale_conflicts(yaml.safe_load(f"models: [{MODEL}, {text}}}]"))
    return {conflict.path.removeprefix("models[0]."): conflict.found for conflict in found}


def test_maximum_is_the_only_required_setting() -> None:
    assert scale("{max: 8}") == Scale(8)


def test_replica_count_is_fixed_without_a_scale_section() -> None:
    assert load(f"models: [{MODEL}}}]", "f.yaml").models[0].scaling() is None


def test_objectives_of_the_model_are_converted_to_seconds() -> None:
    found = scale("{max: 8}", ", slo: {ttft_p99_ms: 1500, tpot_p99_ms: 80, latency_p99_ms: 9000}")

    assert (found.ttft_s, found.tpot_s, found.latency_s) == (1.5, 0.08, 9.0)


def test_every_setting_is_accepted() -> None:
    found = scale(
        "{min: 0, max: 8, policy: hpa, signal: duty, shadow: true, signals: [{signal: duty, above: 0.7}],"
        " to_zero_after_s: 60, up: {window_s: 5, replicas: 2, in_s: 30}, lead_s: 90,"
        ' schedule: [{days: mon-fri, start: "08:00", end: "20:00", zone: Europe/Berlin, min: 2, max: 12}, {max: 4}]}'
    )

    assert (found.min, found.max, found.most, found.policy, found.shadow) == (0, 8, 12, Policy.HPA, True)
    assert (found.signal, found.target, found.lead_s, found.to_zero_after_s) == (Signal.DUTY, 0.7, 90, 60)
    assert found.limits == (Limit(Signal.DUTY, 0.7, 120.0),)
    assert (found.up, found.down) == (Pace(5, 2, 30), Pace(0.0))
    assert found.schedule[0] == ((0, 1, 2, 3, 4), 480, 1200, "Europe/Berlin", 2, 12)


def test_other_policies_have_their_own_default_windows() -> None:
    assert scale("{max: 8}").down.window_s == 300
    assert scale("{max: 8, policy: kpa}").down.window_s == 0
    assert scale("{max: 8, policy: kpa, down: {window_s: 60}, target: 3}").down.window_s == 60


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("replicas: 0", {"replicas": "0"}),
        ("replicas: 0, scale: {max: 4}", {"replicas": "0"}),
        ("replicas: 5, scale: {max: 4}", {"replicas": "5"}),
        ("scale: {min: 5, max: 4}", {"scale.min": "5"}),
        ("scale: {max: 4, policy: slo}", {"scale.policy": '"slo"'}),
        ("slo: {availability: 0.9}, scale: {max: 4, policy: slo}", {"scale.policy": '"slo"'}),
        ("scale: {max: 4, schedule: [{zone: Nowhere}]}", {"scale.schedule[0].zone": '"Nowhere"'}),
        ("scale: {max: 4, schedule: [{min: 5}]}", {"scale.schedule[0].min": "5"}),
        ("scale: {min: 3, max: 4, schedule: [{}, {max: 2}]}", {"scale.schedule[1].max": "2"}),
        ("scale: {min: 3}", {}),  # others say what is missing, and what has a wrong type
        ("scale: 4", {}),
        ("scale: {max: many, schedule: 5}", {}),
    ],
)
def test_conflicting_settings_are_reported(text: str, found: dict[str, str]) -> None:
    assert conflicts(text) == found


def test_all_scaling_conflicts_are_reported_when_a_file_is_read() -> None:
    with pytest.raises(ClusterFileError) as caught:
        load(f"models: [{MODEL}, replicas: 9, scale: {{min: 5, max: 4}}}}]", "f.yaml")

    assert [problem.path for problem in caught.value.problems] == ["models[0].replicas", "models[0].scale.min"]


@pytest.mark.parametrize(
    "text",
    [
        "replicas: 0, scale: {min: 0, max: 4}",
        "scale: {min: 2, max: 4}",
        "slo: {tpot_p99_ms: 9}, scale: {max: 4, policy: slo, schedule: [{start: 20:00}]}",
    ],
)
def test_compatible_settings_are_accepted(text: str) -> None:
    cluster = load(f"models: [{MODEL}, {text}}}]", "f.yaml")

    assert Cluster.model_validate(cluster.model_dump()) == cluster
