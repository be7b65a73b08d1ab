"""Groups command options into dataclasses."""

import inspect
from collections.abc import Callable
from dataclasses import fields
from functools import wraps
from typing import Any, ParamSpec, TypeVar, get_type_hints

P = ParamSpec("P")
R = TypeVar("R")


def with_fields(**groups: type[Any]) -> Callable[[Callable[P, R]], Callable[..., R]]:
    """Decorate a command: parameters with these names, which are dataclasses, are replaced by options for their
    fields."""

    def expand(command: Callable[P, R]) -> Callable[..., R]:
        own = {name: _parameters(group) for name, group in groups.items()}
        signature = inspect.signature(command, eval_str=True)
        others = [each for name, each in signature.parameters.items() if name not in groups]

        @wraps(command)
        def expanded(*words: Any, **options: Any) -> R:
            for name, group in groups.items():
                options[name] = group(**{each.name: options.pop(each.name) for each in own[name]})
            return command(*words, **options)

        parameters = [*others, *(each for group in own.values() for each in group)]
        expanded.__signature__ = signature.replace(parameters=parameters)  # type: ignore[attr-defined]
        expanded.__annotations__ = {each.name: each.annotation for each in parameters}
        return expanded

    return expand


def _parameters(group: type[Any]) -> list[inspect.Parameter]:
    hints = get_type_hints(group, include_extras=True)
    keyword = inspect.Parameter.KEYWORD_ONLY
    return [
        inspect.Parameter(each.name, keyword, default=each.default, annotation=hints[each.name])
        for each in fields(group)
    ]
