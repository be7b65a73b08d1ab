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
