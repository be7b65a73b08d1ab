"""Tenants and access settings of the cluster file, and their conflicts."""

from typing import get_args

import pytest

from forebay.core import admission, cluster
from forebay.core.cluster import Cluster
from forebay.core.tenancy import Quota, Tenant
from forebay.wire.clusterfile import ClusterFileError, Problem, load

MODELS = "models: [{name: chat, task: chat, source: a}, {name: embed-small, task: embed, source: b}]\n"
KEYS = "gateway: {auth: keys}\n"


def problems(text: str, **overrides: str) -> dict[str, Problem]:
    with pytest.raises(ClusterFileError) as caught:
        load(MODELS + text, "f.yaml", overrides)
    paths = [problem.path for problem in caught.value.problems]
    assert len(set(paths)) == len(paths)
    return {problem.path: problem for problem in caught.value.problems}


def one(text: str, **overrides: str) -> Problem:
    (problem,) = problems(text, **overrides).values()
    return problem


def test_bands_of_the_cluster_file_equal_those_of_admission() -> None:
    assert [name.upper() for name in get_args(cluster.Band)] == [band.name for band in admission.Band]


def test_tenant_with_only_a_name_may_use_everything_without_limits() -> None:
    made = load(f"{MODELS}{KEYS}tenants: [{{name: team-a}}]", "f.yaml")

    assert [tenant.value() for tenant in made.tenants] == [Tenant("team-a")]


def test_tenant_with_all_settings_is_read() -> None:
    text = """\
gateway: {auth: keys, keys_file: secrets/keys.json, host: 0.0.0.0}
tenants:
  - name: team-a
    models: [chat, "embed-*"]
    band: batch
    band_max: interactive
    limits: {requests_per_min: 60, tokens_per_min: 10000, streams_max: 4, tokens_per_day: 1000000}
"""
    made = load(MODELS + text, "f.yaml", {"tenants[0].limits.streams_max": "8"})

    assert made.gateway.keys_file == "secrets/keys.json"
    assert made.tenants[0].value() == Tenant(
        "team-a",
        ("chat", "embed-*"),
        admission.Band.BATCH,
        admission.Band.INTERACTIVE,
        Quota(60, 10_000, 8, 1_000_000),
    )


@pytest.mark.parametrize("host", ["127.0.0.1", "127.8.0.1", "::1", "localhost"])
def test_without_keys_a_gateway_listens_on_loopback(host: str) -> None:
    assert load(f"{MODELS}gateway: {{host: '{host}'}}", "f.yaml").gateway.auth == "off"


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "10.0.0.1", "example.org"])
def test_gateway_without_keys_listens_elsewhere_only_if_configured(host: str) -> None:
    problem = one(f"gateway: {{host: '{host}'}}")

    assert (problem.path, problem.found) == ("gateway.host", f'"{host}"')
    for fix in ("127.0.0.1", "`gateway.auth: keys`", "`gateway.auth: open`"):
        assert fix in problem.allowed
    assert load(f"{MODELS}gateway: {{host: '{host}', auth: open}}", "f.yaml").gateway.host == host
    assert load(f"{MODELS}tenants: [{{name: t}}]\ngateway: {{host: '{host}', auth: keys}}", "f.yaml")


@pytest.mark.parametrize("host", ["0.0.0.0", "10.0.0.1", "example.org"])
def test_without_keys_the_admin_api_listens_on_loopback_only(host: str) -> None:
    problem = one(f"admin: {{host: '{host}'}}")

    assert (problem.path, problem.found) == ("admin.host", f'"{host}"')
    assert "`admin.auth: keys`" in problem.allowed
    assert load(f"{MODELS}admin: {{host: '{host}', auth: keys}}", "f.yaml").admin.host == host
    assert load(f"{MODELS}admin: {{host: localhost}}", "f.yaml").admin.auth == "off"


@pytest.mark.parametrize(
    ("text", "path", "says"),
    [
        (KEYS, "tenants", "at least one tenant"),
        (f"{KEYS}tenants: []", "tenants", "at least one tenant"),
        (f"{KEYS}tenants: null", "tenants", "list"),
        (f"{KEYS}tenants: x", "tenants", "list"),
        (f"{KEYS}tenants: [5]", "tenants[0]", "section"),
        ("tenants: [{name: t}]", "gateway.auth", '"keys"'),
        ("gateway: {auth: open}\ntenants: [{name: t}]", "gateway.auth", '"keys"'),
        ("gateway: {auth: on}", "gateway.auth", '"open", "keys"'),
        ("gateway: {trusted_proxies: [10.0.0.0/8, lb]}", "gateway.trusted_proxies[1]", "10.0.0.0/8"),
        ("gateway: {trusted_proxies: [7]}", "gateway.trusted_proxies[0]", "text"),
        ("gateway: {host: 5}", "gateway.host", "text"),
        ("admin: {host: 5}", "admin.host", "text"),
        ("admin: 5", "admin", "section"),
        (f"{KEYS}tenants: [{{name: T!}}]", "tenants[0].name", "a-z"),
        (f"{KEYS}tenants: [{{name: t}}, {{name: t}}]", "tenants[1].name", "no other tenant"),
        (f"{KEYS}tenants: [{{name: t, models: [chat, 'emb*', chta]}}]", "tenants[0].models[2]", "chat, embed-small"),
        (f"{KEYS}tenants: [{{name: t, models: []}}]", "tenants[0].models", "at least 1"),
        (f"{KEYS}tenants: [{{name: t, models: 5}}]", "tenants[0].models", "list"),
        (f"{KEYS}tenants: [{{name: t, models: [5]}}]", "tenants[0].models[0]", "text"),
        (f"{KEYS}tenants: [{{name: t, band: urgent}}]", "tenants[0].band", '"interactive"'),
        (f"{KEYS}tenants: [{{name: t, band_max: batch}}]", "tenants[0].band_max", "a higher priority"),
        (f"{KEYS}tenants: [{{name: t, limits: 5}}]", "tenants[0].limits", "requests_per_min"),
        (f"{KEYS}tenants: [{{name: t, limits: {{streams_max: 0}}}}]", "tenants[0].limits.streams_max", "from 1"),
        (f"{KEYS}tenants: [{{name: t, limits: {{rpm: 1}}}}]", "tenants[0].limits.rpm", "requests_per_min"),
    ],
)
def test_invalid_setting_is_named_with_allowed_values(text: str, path: str, says: str) -> None:
    problem = one(text)

    assert problem.path == path
    assert says in problem.allowed


def test_limit_below_the_number_of_gateway_processes_is_rejected() -> None:
    text = "gateway: {auth: keys, processes: 4}\ntenants: [{name: t, limits: {streams_max: 3, requests_per_min: 4}}]"
    problem = one(text)

    assert (problem.path, problem.found) == ("tenants[0].limits.streams_max", "3")
    assert "at least 4" in problem.allowed
    assert list(problems(text, **{"gateway.processes": "many"})) == ["gateway.processes"]


def test_allow_list_pattern_must_match_an_existing_name() -> None:
    text = f"models: [{{task: chat, source: a}}]\n{KEYS}tenants: [{{name: t, models: [chat]}}]"
    with pytest.raises(ClusterFileError) as caught:
        load(text, "f.yaml")

    assert {p.path for p in caught.value.problems} == {"models[0].name", "tenants[0].models[0]"}


def test_clusters_built_in_code_are_validated_alike() -> None:
    model = {"name": "a", "task": "chat", "source": "x"}
    with pytest.raises(ValueError, match=r"gateway\.auth: open"):
        Cluster.model_validate({"models": [model], "gateway": {"host": "0.0.0.0"}})
    tenants = [{"name": "t"}, {"name": "t"}]
    with pytest.raises(ValueError, match="no other tenant has"):
        Cluster.model_validate({"models": [model], "gateway": {"auth": "keys"}, "tenants": tenants})
