"""The files of this checkout, as the tidy tests see them."""

import ast
import gc
import subprocess
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parents[2]
TEXT_SUFFIXES = {".py", ".md", ".toml", ".yaml", ".yml", ".json", ".txt", ".lock", ".cfg", ".sh", ".svg", ""}


@cache
def files() -> tuple[Path, ...]:
    """Every file that git has or would take, sorted."""
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard", "-z"]
    listed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    return tuple(sorted(ROOT / name for name in listed.split("\0") if name and (ROOT / name).is_file()))


def python_files(*tops: str) -> list[Path]:
    """The Python files below the named folders of the root."""
    return [p for p in files() if p.suffix == ".py" and name(p).startswith(tuple(f"{top}/" for top in tops))]


def text_files() -> list[Path]:
    """Everything a person wrote, or could have."""
    return [p for p in files() if p.suffix in TEXT_SUFFIXES]


def name(path: Path) -> str:
    """The path from the root."""
    return path.relative_to(ROOT).as_posix()


@cache
def tree(path: Path) -> ast.Module:
    """The syntax tree of a file."""
    parsed = ast.parse(path.read_text(), str(path))
    gc.freeze()  # millions of nodes that stay: the collector would look through them all, again and again
    return parsed


@cache
def statements(path: Path) -> tuple[ast.AST, ...]:
    """All of a file but expressions, which are most of it: every statement, every handler of exceptions."""
    found: list[ast.AST] = []
    below: list[ast.AST] = [tree(path)]
    while below:
        node = below.pop()
        found.append(node)
        for part in ("body", "handlers", "orelse", "finalbody", "cases"):
            inner = getattr(node, part, ())
            below += inner if isinstance(inner, list) else ()
    return tuple(found)


def list_of(problems: list[str]) -> str:
    """Problems one a line, for the message of an assertion."""
    return "\n  " + "\n  ".join(problems)
