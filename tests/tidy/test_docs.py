"""Documentation that can be wrong is checked: generated pages, the picture of the tree, docstrings, commands."""

import ast
import re
from functools import cache
from pathlib import Path

import pytest
from tests.tidy.checkout import ROOT, list_of, name, python_files, statements, tree

from forebay.cli import docs
from forebay.core.errors import OK, TABLE, Blame, Code
from forebay.engines import ADAPTERS
from forebay.obs import metrics

CALLBACKS = {
    "connection_made", "connection_lost", "data_received", "eof_received", "pause_writing", "resume_writing",
    "on_message_begin", "on_url", "on_status", "on_header", "on_headers_complete", "on_body", "on_message_complete",
    "on_chunk_header", "on_chunk_complete",
    "write_eof", "get_write_buffer_size", "get_write_buffer_limits", "set_write_buffer_limits", "is_closing", "abort",
    "get_extra_info",
}  # fmt: skip
"""Methods whose contract asyncio and httptools define."""

ARCHITECTURE = ROOT / "ARCHITECTURE.md"
DECISION_LINES_MAX = 60
DECISION_PARTS = ("## Context", "## Decision", "## Consequences", "## What would change our mind")


PAGES = [
    Path("docs/settings.md"),
    Path("docs/metrics.md"),
    Path("docs/errors.md"),
    Path("docs/cli.md"),
    Path("docs/tree.md"),
    Path("docs/benchmarks.md"),
    Path("README.md"),
    Path("ARCHITECTURE.md"),
]


@pytest.mark.parametrize("path", PAGES, ids=str)
def test_generated_pages_are_up_to_date(path: Path) -> None:
    expected = docs.pages(ROOT)[ROOT / path]

    assert (ROOT / path).read_text() == expected, f"{path} is out of date: run `make docs`"


def test_every_generated_page_is_checked() -> None:
    assert {ROOT / p for p in PAGES} == set(docs.pages(ROOT)), "add the new page to PAGES"


@cache
def contracts() -> set[str]:
    """Methods that a protocol of ours documents; who implements them does not say it again."""
    return {
        method.name
        for path in python_files("src")
        for node in statements(path)
        if isinstance(node, ast.ClassDef) and any(ast.unparse(base).startswith("Protocol") for base in node.bases)
        for method in node.body
        if isinstance(method, ast.FunctionDef | ast.AsyncFunctionDef) and ast.get_docstring(method)
    }


def public_without_docstring(path: Path) -> list[str]:
    found = []
    module = tree(path)
    elsewhere = CALLBACKS | contracts()

    def visit(body: list[ast.stmt], inside: str) -> None:
        for node in body:
            if not isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
                continue
            if node.name.startswith("_") or (inside and node.name in elsewhere):
                continue
            setter = any(isinstance(d, ast.Attribute) and d.attr == "setter" for d in node.decorator_list)
            if ast.get_docstring(node) is None and not setter:
                found.append(f"{name(path)}:{node.lineno} {inside}{node.name}")
            if isinstance(node, ast.ClassDef):
                visit(node.body, f"{node.name}.")

    if ast.get_docstring(module) is None and path.name != "__main__.py":
        found.append(f"{name(path)}:1 the module")
    visit(module.body, "")
    return found


def test_everything_public_says_what_it_promises() -> None:
    silent = [entry for path in python_files("src") for entry in public_without_docstring(path)]

    assert not silent, f"add a docstring of one to three lines, or make it private:{list_of(silent)}"


def test_the_architecture_fits_a_sitting() -> None:
    assert len(ARCHITECTURE.read_text().splitlines()) <= 150, "shorten ARCHITECTURE.md to 150 lines"


@pytest.mark.parametrize("path", sorted((ROOT / "docs/decisions").glob("*.md")), ids=lambda p: p.stem)
def test_a_decision_is_one_page_with_its_four_parts(path: Path) -> None:
    text = path.read_text()

    assert re.fullmatch(r"\d{4}-[a-z0-9-]+", path.stem), "name it NNNN-some-words.md"
    assert [part for part in DECISION_PARTS if part not in text] == [], "a decision has four parts"
    assert len(text.splitlines()) <= DECISION_LINES_MAX, f"at most {DECISION_LINES_MAX} lines"


def test_decisions_are_numbered_without_gaps() -> None:
    numbers = sorted(int(p.name[:4]) for p in (ROOT / "docs/decisions").glob("*.md"))

    assert numbers == list(range(1, len(numbers) + 1))


def test_links_between_documents_lead_somewhere() -> None:
    documents = [ROOT / "README.md", ARCHITECTURE, ROOT / "CHANGELOG.md", *(ROOT / "docs").rglob("*.md")]
    dead = [
        f"{name(document)}: {target}"
        for document in documents
        for target in re.findall(r"\]\(([^)#:]+?)(?:#[^)]*)?\)", re.sub(r"`[^`\n]*`", "", document.read_text()))
        if not (document.parent / target).exists()
    ]

    assert not dead, f"mend or remove these links:{list_of(dead)}"


def test_the_readme_has_a_row_for_every_command() -> None:
    commands = re.findall(r"^## (forebay .+)$", docs.cli_page(), re.MULTILINE)
    rows = re.findall(r"^\| `(forebay [a-z ]+?)(?: [A-Z]+)?` \|", (ROOT / "README.md").read_text(), re.MULTILINE)

    assert sorted(rows) == sorted(commands), "mend the table of commands in README.md"


def test_every_metric_carries_the_prefix() -> None:
    store = metrics.Metrics()
    for metric in metrics.TABLE:
        make = {"counter": store.counter, "gauge": store.gauge, "histogram": store.histogram}[metric.kind]
        make(metric.name, *("x" for _ in metric.labels))
    shown = re.findall(r"^# TYPE (\S+)", store.render().decode(), re.MULTILINE)

    assert len(shown) >= len(metrics.TABLE)
    assert [n for n in shown if not n.startswith("forebay_")] == []


def test_every_error_code_has_its_row() -> None:
    assert set(TABLE) == set(Code), "a code without a row, or a row without a code, in core/errors.py"


def test_every_engine_is_in_the_contract_suite() -> None:
    suites = "\n".join(p.read_text() for p in python_files("tests/contract") if "engine" in p.name)
    absent = [f"{engine} ({ADAPTERS[engine][0]})" for engine in sorted(ADAPTERS) if f'"{engine}"' not in suites]

    assert not absent, f"add these to the parametrisation of the engine contract in tests/contract:{list_of(absent)}"


def test_the_alert_rules_count_every_code_that_is_not_the_clients_fault() -> None:
    counted = re.findall(r'code=~"([^"]+)"', (ROOT / "docs/availability.md").read_text())
    of_admin_api = {Code.STORE_UNAVAILABLE, Code.NOT_LEADER}
    ours = {code.value for code, row in TABLE.items() if row.blame is not Blame.CLIENT and code not in of_admin_api}

    assert [set(each.split("|")) for each in counted] == [ours | {OK}]
