"""The generated pages: what the generator makes of code and of measurements."""

import json
from pathlib import Path

import pytest

from forebay.cli import docs
from forebay.cli.settings import VARIABLES
from forebay.core.cluster import Cluster
from forebay.core.errors import Code

MACHINE = {"cpus": 2, "kernel": "6", "python": "3.11"}


def test_every_setting_of_the_schema_is_on_its_page() -> None:
    page = docs.settings_page()
    schema = Cluster.model_json_schema()

    for section in (schema, *schema["$defs"].values()):
        for key in section.get("properties", {}):
            assert f"| `{key}` |" in page
    assert all(f"`{name}`" in page for name in VARIABLES)


def test_every_error_and_command_is_on_its_page() -> None:
    assert all(f"| `{code}` |" in docs.errors_page() for code in Code)
    for command in ("up", "serve", "status", "chat", "bench", "doctor", "schema", "config check"):
        assert f"## forebay {command}\n" in docs.cli_page()


def test_a_cell_cannot_break_its_table() -> None:
    assert docs.table(("a",), [("x|y\nz",)]).splitlines()[2] == "| x\\|y z |"


def test_measurements_become_tables_and_no_measurement_is_said(tmp_path: Path) -> None:
    assert docs.NOT_MEASURED in docs.bench_block(tmp_path)

    for name in ("gateway", "path"):
        (tmp_path / name).mkdir()
    gateway = {"forebay": {"a": {"cpu_us": 30.0}}, "nginx": {"a": {"cpu_us": 10.0}}, "slow": {"b": {"cpu_us": 1.0}}}
    (tmp_path / "gateway/results.json").write_text(
        json.dumps({"machine": MACHINE, "rounds": 3, "versions": {"nginx": "1.2"}, "figures": gateway})
    )
    path = {
        "bare_tokens_per_s": 60.0, "path_tokens_per_s": 57.0, "ratio": 0.95, "ratio_min": 0.9, "ratio_max": 1.0,
        "ttft_p50_ms": 50.0, "tpot_p50_ms": 16.0,
    }  # fmt: skip
    (tmp_path / "path/results.json").write_text(
        json.dumps({"machine": MACHINE, "rounds": 3, "figures": {"chat_8": path}})
    )
    block = docs.bench_block(tmp_path)

    assert "| a | **30** | 10 (forebay: 3.00x) | - |" in block
    assert "nginx 1.2" in block
    assert "| chat, at once: 8 | tokens | 60 | 57 | 0.95 (0.90 to 1.00) |" in block


def test_a_page_without_its_markers_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "README.md").write_text("# nothing\n")

    with pytest.raises(ValueError, match="bench:begin"):
        docs.with_block(tmp_path / "README.md", docs.bench_block(tmp_path))
