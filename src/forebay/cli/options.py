"""Options that several commands share, and dataclasses as groups of options: each option is declared once."""

import inspect
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields
from functools import wraps
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final, Literal, ParamSpec, TypeVar, get_args, get_type_hints

import typer
from typer.models import OptionInfo

if TYPE_CHECKING:
    from forebay.cli.deploy.client import Admin

P = ParamSpec("P")
R = TypeVar("R")
Switch = Literal["true", "false"]
_WORDS: Final = {"true": "true", "on": "true", "1": "true", "false": "false", "off": "false", "0": "false"}
"""What tritonserver takes for a boolean option, in any case."""


def with_fields(**groups: type[Any]) -> Callable[[Callable[P, R]], Callable[..., R]]:
    """Decorate a command: parameters with these names, which are dataclasses, are replaced by options for their
    fields. Options of type `Switch` take every word in `_WORDS`."""

    def expand(command: Callable[P, R]) -> Callable[..., R]:
        own = {name: _parameters(group) for name, group in groups.items()}
        signature = inspect.signature(command, eval_str=True)

        @wraps(command)
        def expanded(*words: Any, **options: Any) -> R:
            for name, group in groups.items():
                options[name] = group(**{each.name: options.pop(each.name) for each in own[name]})
            return command(*words, **options)

        def all_parameters() -> Iterator[inspect.Parameter]:
            for name, parameter in signature.parameters.items():
                yield from own.get(name, (parameter,))

        parameters = list(all_parameters())
        for each in parameters:
            _take_words(each.annotation)
        # Typer reads these two; typeshed's functions have no `__signature__`.
        expanded.__signature__ = signature.replace(parameters=parameters)  # type: ignore[attr-defined]
        expanded.__annotations__ = {each.name: each.annotation for each in parameters}
        return expanded

    return expand


def switch(word: str) -> str:
    """`true` or `false`. Raises `ValueError`."""
    found = _WORDS.get(word.lower())
    if found is None:
        raise ValueError(f"{word!r} is neither true nor false")
    return found


def _take_words(annotation: Any) -> None:
    base, *infos = get_args(annotation) or (None,)
    for info in infos:
        if isinstance(info, OptionInfo) and base in (Switch, Switch | None):
            info.parser, info.metavar = switch, info.metavar or "true|false"


def _parameters(group: type[Any]) -> list[inspect.Parameter]:
    hints = get_type_hints(group, include_extras=True)
    keyword = inspect.Parameter.KEYWORD_ONLY
    return [
        inspect.Parameter(each.name, keyword, default=each.default, annotation=hints[each.name])
        for each in fields(group)
    ]


def given_options(group: Any) -> list[str]:
    """The options of a group that were given another value than their default."""
    return [
        _name_of(parameter)
        for parameter in _parameters(type(group))
        if getattr(group, parameter.name) not in (parameter.default, [])
    ]


def _name_of(parameter: inspect.Parameter) -> str:
    """The first name that is declared for an option, else its field's; Typer has the first one as `default`."""
    for info in get_args(parameter.annotation)[1:]:
        if isinstance(info.default, str) and info.default.startswith("--"):
            return info.default
    return f"--{parameter.name.replace('_', '-')}"


TASKS_HELP: Final = "chat, embed or tensor."
ENGINES_HELP: Final = "openvino, llamacpp, onnx, modelserver or synthetic."
FROM_SOURCE: Final = "from the source"
"""Shown as the default of what the source of a model implies."""

FileOption = Annotated[
    Path | None,
    typer.Option("--file", "-f", help="Cluster file.", show_default="./forebay.yaml, else the demo"),
]
SetOption = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="PATH=VALUE", help="Set one value of the cluster file, such as gateway.port=9000."),
]
JsonOption = Annotated[bool, typer.Option("--json", help="Print JSON.")]
WatchOption = Annotated[bool, typer.Option("--watch", "-w", help="Keep the view up to date until Ctrl-C.")]
ModelArgument = Annotated[str | None, typer.Argument(help="Only this model.", show_default="all")]
_REASON: Final = "Reason, recorded in the history."
WhyOption = Annotated[str, typer.Option("--why", help=_REASON)]
ReasonOption = Annotated[str, typer.Option("--reason", help=_REASON)]

ServerUrlOption = Annotated[
    str | None,
    typer.Option("--url", help="Base URL of an OpenAI-compatible server.", show_default="FOREBAY_URL, else the demo"),
]
ApiKeyOption = Annotated[
    str | None,
    typer.Option("--api-key", envvar="FOREBAY_API_KEY", help="Bearer token to send.", show_envvar=True),
]
CaOption = Annotated[
    Path | None,
    typer.Option("--ca", envvar="FOREBAY_CA", help="PEM file of the CA to trust for https.", show_envvar=True),
]

AdminUrlOption = Annotated[
    str | None,
    typer.Option("--url", help="Admin API.", show_default="FOREBAY_ADMIN_URL, else that of the cluster file"),
]
TokenOption = Annotated[
    Path | None,
    typer.Option(help="File that holds the API key to send.", show_default="the key in FOREBAY_ADMIN_TOKEN, if any"),
]


@dataclass(frozen=True, slots=True)
class AdminOptions:
    """Options of commands that talk to a running cluster."""

    file: Annotated[
        Path | None,
        typer.Option(
            "--file",
            "-f",
            help="Cluster file of the cluster to talk to.",
            show_default="./forebay.yaml, else what runs",
        ),
    ] = None
    url: AdminUrlOption = None
    token_file: TokenOption = None

    def admin(self) -> "Admin":
        """The admin API that the options name. Raises `UserError`."""
        from forebay.cli.deploy.client import Admin

        return Admin(self.url, self.token_file, self.file)


@dataclass(frozen=True, slots=True)
class StoreOptions(AdminOptions):
    """Options of commands that open the store and files of a cluster, or use the admin API where one is named."""

    file: Annotated[
        Path | None,
        typer.Option("--file", "-f", help="Cluster file.", show_default="./forebay.yaml, if there is one"),
    ] = None
    url: Annotated[
        str | None,
        typer.Option(
            "--url",
            help="Admin API to use instead of the store and the files.",
            show_default="FOREBAY_ADMIN_URL, else none",
        ),
    ] = None

    @property
    def through_api(self) -> bool:
        """Whether a URL or a key names an admin API. The environment counts only if no cluster file is given: the
        first key is created beside the cluster, wherever the environment points to."""
        if self.url or self.token_file:
            return True
        return self.file is None and bool(
            os.environ.get("FOREBAY_ADMIN_URL") or os.environ.get("FOREBAY_ADMIN_TOKEN")
        )
