"""Caps on size: what does not fit a head does not fit a file."""

import ast
from collections import Counter
from pathlib import Path

from tests.tidy.checkout import list_of, name, python_files, statements

FILE_LINES_MAX = 500
FUNCTION_LINES_MAX = 60
CORE_FUNCTION_LINES_MAX = 40
FOLDER_FILES_MAX = 12
BANNED_NAMES = {"util", "utils", "common", "helper", "helpers", "manager", "managers", "base", "misc"}


def test_no_file_is_longer_than_the_cap() -> None:
    lengths = {name(p): len(p.read_text().splitlines()) for p in python_files("src", "tests", "bench")}
    long = [f"{file}: {lines} lines" for file, lines in lengths.items() if lines > FILE_LINES_MAX]

    assert not long, f"split these by what they decide, at most {FILE_LINES_MAX} lines:{list_of(long)}"


def function_lines(function: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    """Lines from `def` to the end, without the docstring."""
    lines = (function.end_lineno or function.lineno) - function.lineno + 1
    first = function.body[0]
    if isinstance(first, ast.Expr) and isinstance(first.value, ast.Constant) and isinstance(first.value.value, str):
        lines -= (first.end_lineno or first.lineno) - first.lineno + 1
    return lines


def long_functions(path: Path, cap: int) -> list[str]:
    found = []
    for node in statements(path):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and function_lines(node) > cap:
            found.append(f"{name(path)}:{node.lineno} {node.name}: {function_lines(node)} lines")
    return found


def test_no_function_is_longer_than_the_cap() -> None:
    long = [f for p in python_files("src", "tests", "bench") for f in long_functions(p, FUNCTION_LINES_MAX)]

    assert not long, f"split these, at most {FUNCTION_LINES_MAX} lines without the docstring:{list_of(long)}"


def test_no_function_of_core_is_longer_than_its_cap() -> None:
    long = [f for p in python_files("src/forebay/core") for f in long_functions(p, CORE_FUNCTION_LINES_MAX)]

    assert not long, f"split these, at most {CORE_FUNCTION_LINES_MAX} lines in core:{list_of(long)}"


def test_no_folder_has_more_files_than_the_cap() -> None:
    counts = Counter(p.parent for p in python_files("src", "tests", "bench"))
    full = [f"{name(folder)}: {count} files" for folder, count in sorted(counts.items()) if count > FOLDER_FILES_MAX]

    assert not full, f"join or group files, at most {FOLDER_FILES_MAX} Python files a folder:{list_of(full)}"


def test_no_module_has_a_name_that_says_nothing() -> None:
    vague = [
        name(p)
        for p in python_files("src", "tests", "bench")
        if BANNED_NAMES & {p.stem, *(part.lower() for part in Path(name(p)).parts[:-1])}
    ]

    assert not vague, f"name these after what they own or decide:{list_of(vague)}"
