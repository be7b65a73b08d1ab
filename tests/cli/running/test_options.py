"""Options that several commands share are declared once."""

from collections.abc import Iterator
from typing import Any

import typer

from forebay.cli.main import app


def commands(command: Any, name: str = "") -> Iterator[tuple[str, dict[str, Any]]]:
    """All commands by name, with their options by name."""
    inner = getattr(command, "commands", {})
    for word, each in inner.items():
        yield from commands(each, f"{name} {word}".strip())
    if not inner:
        yield name, {each.opts[0]: each for each in command.params if each.param_type_name == "option"}


WITH_KEY = {name: options for name, options in commands(typer.main.get_command(app)) if "--token-file" in options}
"""The commands that may use the admin API."""


def descriptions(option: str, *but: str) -> set[tuple[str, str]]:
    """How these commands describe an option."""
    found = [options[option] for name, options in WITH_KEY.items() if option in options and name not in but]
    return {(each.help, str(each.show_default)) for each in found}


def test_commands_describe_the_admin_api_in_the_same_words() -> None:
    assert len(WITH_KEY) > 30
    assert all({"--url", "--file"} <= options.keys() for options in WITH_KEY.values())
    assert [len(descriptions(each)) for each in ("--token-file", "--why", "--reason")] == [1, 1, 1]
    assert len(descriptions("--url")) == 2, "that of the running cluster, or one to use instead of the store"
    assert len(descriptions("--file", "apply")) == 2, "apply: the file that is applied"
