"""Conflicts in a cluster, given as plain data."""

import pytest

from forebay.core.cluster import conflicts


@pytest.mark.parametrize(
    ("model", "path"),
    [
        ({"slo": {"drop_late": True}}, "models[0].slo.drop_late"),
        ({"spares": "auto"}, "models[0].spares"),
        ({"slo": {"drop_late": True, "ttft_p99_ms": 500, "availability": 0.999}, "spares": "auto"}, None),
    ],
)
def test_objectives_require_the_settings_they_depend_on(model: dict[str, object], path: str | None) -> None:
    found = [each.path for each in conflicts({"models": [{"name": "m", "task": "chat", **model}]})]
    assert found == ([path] if path else [])


@pytest.mark.parametrize("host", ["", "127.0.0..1", "127.0.0.1:9", "http://localhost", "[::1]", "*", "ü", "a" * 64])
def test_host_must_be_an_address_or_a_name(host: str) -> None:
    found = conflicts(
        {"gateway": {"host": host}, "admin": {"host": host}, "nodes": [{"name": "a"}, {"name": "b", "host": host}]}
    )

    assert [conflict.path for conflict in found] == ["gateway.host", "admin.host", "nodes[1].host"]
    assert {conflict.allowed for conflict in found} == {"an IP address or a host name, without a port"}


@pytest.mark.parametrize("host", ["127.0.0.1", "::1", "fe80::1%eth0", "0.0.0.0", "gpu-1.example", "my_node"])
def test_host_may_be_an_address_or_a_name(host: str) -> None:
    section = {"host": host, "auth": "open"}

    assert conflicts({"gateway": section, "admin": {"host": host, "auth": "keys"}, "nodes": [{"host": host}]}) == ()
