"""Expressions in programs of `torch.export`, which PyTorch gives to `eval`: only arithmetic is let through."""

import ast
import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Final

import sympy
import torch.utils._sympy.functions as torch_functions

SHOWN_MAX: Final = 80
NAME: Final = re.compile(r"[A-Za-z_]\w*|[-+.\dEe]+", re.ASCII)
"""Texts that expressions contain: names of symbols, and decimal numbers."""
TAKE_TEXT: Final = ("Symbol", "Float")
HARMLESS: Final = (
    ast.Expression, ast.Load, ast.Name, ast.keyword,
    ast.BinOp, ast.UnaryOp, ast.BoolOp, ast.Compare, ast.operator, ast.unaryop, ast.boolop, ast.cmpop,
)  # fmt: skip


class NotArithmetic(Exception):  # noqa: N818 - states the condition
    """An expression in a file would run code."""


@contextmanager
def only_arithmetic(wanted: bool) -> Iterator[None]:
    """Within this context, `sympy.sympify`, as PyTorch calls it, raises `NotArithmetic` for other texts."""
    before = sympy.sympify

    def checked(given: Any, *rest: Any, **more: Any) -> Any:
        if isinstance(given, str) and not is_arithmetic(given):
            raise NotArithmetic(f"it holds {given[:SHOWN_MAX]!r} as the size of a tensor, which would run code")
        return before(given, *rest, **more)

    if wanted:
        sympy.sympify = checked
    try:
        yield
    finally:
        sympy.sympify = before


def is_arithmetic(text: str) -> bool:
    """Whether a text has only numbers, symbols, operators and calls of SymPy's and PyTorch's functions."""
    if not (text.isascii() and text.isprintable()) or "#" in text:
        return False
    try:
        tree = ast.parse(text, mode="eval")
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return False
    texts = {
        id(node.args[0])
        for node in ast.walk(tree)
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in TAKE_TEXT and node.args
    }
    return all(_is_harmless(node, texts) for node in ast.walk(tree))


def _is_harmless(node: ast.AST, texts: set[int]) -> bool:
    if isinstance(node, ast.Call):
        return isinstance(node.func, ast.Name) and _is_function(node.func.id)
    if isinstance(node, ast.Constant):
        if isinstance(node.value, str):
            return id(node) in texts and NAME.fullmatch(node.value) is not None
        return isinstance(node.value, bool | int | float)
    return isinstance(node, HARMLESS)


def _is_function(name: str) -> bool:
    found = getattr(torch_functions, name, None) or getattr(sympy, name, None)
    return isinstance(found, type) and issubclass(found, sympy.Basic)
