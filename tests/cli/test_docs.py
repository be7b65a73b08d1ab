"""Generated documentation pages: output of the generator for code and measurements."""

from pathlib import Path

import pytest

from forebay.cli import docs
from forebay.cli.measured import page
from forebay.cli.settings import VARIABLES
from forebay.core.cluster import Cluster
from forebay.core.errors import Code


def test_every_setting_is_documented() -> None:
    page = docs.settings_page()
    schema = Cluster.model_json_schema()

    for section in (schema, *schema["$defs"].values()):
        for key in section.get("properties", {}):
            assert f"| `{key}` |" in page
    assert all(f"`{name}`" in page for name in VARIABLES)


def test_every_error_and_command_is_documented() -> None:
    assert all(f"| `{code}` |" in docs.errors_page() for code in Code)
    for command in ("up", "serve", "status", "chat", "bench", "doctor", "schema", "config check"):
        assert f"## forebay {command}\n" in docs.cli_page()


def test_table_cells_are_escaped() -> None:
    assert docs.table(("a",), [("x|y\nz",)]).splitlines()[2] == "| x\\|y z |"


def test_a_page_without_its_markers_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "README.md").write_text("# nothing\n")

    with pytest.raises(ValueError, match="bench:begin"):
        docs.with_block(tmp_path / "README.md", page.summary(tmp_path))
