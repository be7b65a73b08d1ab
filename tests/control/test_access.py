"""Tenancy in gateway specifications, and what changes it."""

from pathlib import Path
from typing import Any

import msgspec
import pytest

from forebay.control.changes import effects
from forebay.control.plan import Artifact, Places, Plan, make_plan
from forebay.core.cluster import Cluster
from forebay.core.model import GatewaySpec
from forebay.core.tenancy import Quota, Tenant

MODEL = {"name": "chat", "task": "chat", "source": "x", "engine": "synthetic"}


def plan(folder: Path, gateway: dict[str, Any], *tenants: dict[str, Any]) -> Plan:
    cluster = Cluster.model_validate({"models": [MODEL], "gateway": gateway, "tenants": list(tenants)})
    return make_plan(cluster, {"chat": Artifact(Path("x"), "d", "synthetic", {})}, Places(folder), "1")


def specs(made: Plan) -> list[GatewaySpec]:
    return [slot.spec for slot in made.gateways if isinstance(slot.spec, GatewaySpec)]


@pytest.mark.parametrize(
    ("host", "url"),
    [
        ("127.0.0.1", "http://127.0.0.1:8080"),
        ("0.0.0.0", "http://127.0.0.1:8080"),
        ("::1", "http://[::1]:8080"),
        ("::", "http://[::1]:8080"),
    ],
)
def test_the_url_of_the_gateway_is_one_that_this_machine_can_open(tmp_path: Path, host: str, url: str) -> None:
    assert plan(tmp_path, {"host": host, "auth": "open"}).gateway_url == url


def test_gateway_without_auth_has_no_tenancy(tmp_path: Path) -> None:
    made = plan(tmp_path, {})

    assert specs(made)[0].tenancy is None
    assert made.auth == "off"


def test_gateways_with_auth_share_tenants_and_have_separate_count_files(tmp_path: Path) -> None:
    limits = {"requests_per_min": 60}
    made = plan(tmp_path, {"auth": "keys", "processes": 2}, {"name": "t", "limits": limits})
    first, second = (spec.tenancy for spec in specs(made))

    assert first is not None
    assert second is not None
    assert first.tenants == (Tenant("t", limits=Quota(requests_per_min=60)),)
    assert (first.keys_path, first.leases_path) == (str(tmp_path / "keys.json"), str(tmp_path / "leases.json"))
    assert first.gateways == 2
    assert first.counts_path != second.counts_path
    assert made.auth == "keys"
    spec = specs(made)[0]
    assert msgspec.json.decode(msgspec.json.encode(spec), type=GatewaySpec) == spec


def test_relative_keys_file_becomes_absolute(tmp_path: Path) -> None:
    made = plan(tmp_path, {"auth": "keys", "keys_file": "k.json"}, {"name": "t"})
    tenancy = specs(made)[0].tenancy

    assert tenancy is not None
    assert tenancy.keys_path == str(Path("k.json").absolute())


def test_tenant_changes_are_published_without_replacing_gateways(tmp_path: Path) -> None:
    before = plan(tmp_path, {"auth": "keys"}, {"name": "t"})
    after = plan(tmp_path, {"auth": "keys"}, {"name": "t", "limits": {"streams_max": 1}})

    assert before.gateways[0].digest == after.gateways[0].digest
    assert (before.tenants, after.tenants) == ((Tenant("t"),), (Tenant("t", limits=Quota(streams_max=1)),))
    assert plan(tmp_path, {}).tenants is None
    assert effects(before, after) == ("the gateways apply it within a second",)
    assert before.models == after.models
