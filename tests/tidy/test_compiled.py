"""What modules that are compiled must not do."""

import ast
from fnmatch import fnmatch
from pathlib import Path

from tests.conftest import INTERPRETED
from tests.tidy.checkout import ROOT, list_of, name, python_files, statements, tree

SUSPENDS = (ast.Await, ast.AsyncWith, ast.AsyncFor, ast.Yield, ast.YieldFrom)


def compiled() -> list[Path]:
    """The modules that setup.py compiles."""
    (patterns,) = [
        ast.literal_eval(node.value)
        for node in tree(ROOT / "setup.py").body
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "COMPILED"
    ]
    paths = [path for path in python_files("src") if any(fnmatch(name(path), f"src/forebay/{p}") for p in patterns)]
    assert len(paths) >= len(patterns) > 50
    return paths


def handling(node: ast.AST) -> list[ast.stmt]:
    """What runs while an exception may be handled."""
    if isinstance(node, ast.ExceptHandler):
        return node.body
    return node.finalbody if isinstance(node, ast.Try) else []


def test_compiled_coroutines_do_not_wait_while_they_handle_an_exception() -> None:
    """They keep it in the thread: of two that wait in a handler, one goes on with the other's exception."""
    problems = [
        f"{name(path)}:{inner.lineno}: use what is in modelserver/waiting.py, or handle it after the handler"
        for path in compiled()
        for node in statements(path)
        for statement in handling(node)
        for inner in ast.walk(statement)
        if isinstance(inner, SUSPENDS)
    ]
    assert not problems, f"compiled code waits in a handler:{list_of(problems)}"


def test_compiled_coroutines_enter_only_what_does_not_wait_when_it_is_left() -> None:
    """Locks and timeouts do not; a task group does, while the exception of its body is being handled."""
    problems = [
        f"{name(path)}:{node.lineno}: {ast.unparse(item.context_expr)}"
        for path in compiled()
        for node in statements(path)
        if isinstance(node, ast.AsyncWith)
        for item in node.items
        if isinstance(item.context_expr, ast.Call) and ast.unparse(item.context_expr.func) != "asyncio.timeout"
    ]
    assert not problems, f"use what is in modelserver/waiting.py:{list_of(problems)}"


def imported(path: Path) -> set[Path]:
    """The modules of ours that a file imports, at once or later, and what they import."""
    found, left = {path}, [path]
    while left:
        for node in statements(left.pop()):
            names = [each.name for each in node.names] if isinstance(node, ast.Import | ast.ImportFrom) else []
            if isinstance(node, ast.ImportFrom):
                names = [str(node.module), *(f"{node.module}.{each}" for each in names)]
            for each in (at for name_ in names for at in files(name_)):
                if each not in found:
                    found.add(each)
                    left.append(each)
    return found


def files(module: str) -> list[Path]:
    """The files of a module of ours and of the packages it is in."""
    parts = module.split(".")
    root = ROOT / "src" if parts[0] == "forebay" else ROOT
    stems = [root.joinpath(*parts[:end]) for end in range(1, len(parts) + 1)]
    return [path for stem in stems for path in (stem.with_suffix(".py"), stem / "__init__.py") if path.is_file()]


def test_what_the_compiled_run_leaves_out_has_nothing_compiled() -> None:
    paths = [path for folder in INTERPRETED for path in folder.glob("**/*.py")]
    found = set(compiled())
    problems = [f"{name(path)}: {name(each)}" for path in paths for each in sorted(imported(path) & found)]
    assert len(paths) > len(INTERPRETED)
    assert not problems, f"take the folder out of INTERPRETED:{list_of(problems)}"
