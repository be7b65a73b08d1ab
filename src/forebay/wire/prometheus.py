"""Merges expositions of several processes in Prometheus text format."""

import re
from collections.abc import Mapping
from typing import Final

_NAME: Final = r"[a-zA-Z_:][a-zA-Z0-9_:]*"
_LABEL: Final = r'[a-zA-Z_][a-zA-Z0-9_]*="(?:[^"\\\r\n]|\\[\\"n])*"'
_VALUE: Final = r"(?:[+-]?(?:[0-9]+(?:\.[0-9]+)?(?:e[+-]?[0-9]+)?|Inf)|NaN)"
_LINE: Final = re.compile(
    rf"# HELP {_NAME} [^\r]+|# TYPE {_NAME} (?:counter|gauge|histogram|summary|untyped)"
    rf"|{_NAME}(?:\{{{_LABEL}(?:,{_LABEL})*\}})? {_VALUE}"
)
_SAMPLE: Final = re.compile(r"^(\w+)(\{?)", re.MULTILINE)
_HEAD: Final = re.compile(r"^(# HELP (\S+).*\n(?:# TYPE .*\n)?)", re.MULTILINE)


def check(text: str) -> None:
    """Raises ValueError for text that is not an exposition as our processes produce it. A library takes ten times as
    long."""
    for line in text.removesuffix("\n").split("\n") if text else ():
        if _LINE.fullmatch(line) is None:
            raise ValueError(f"not an exposition: {line[:100]!r}")


def together(texts: Mapping[str, str], label: str) -> str:
    """Merge expositions that each have their own headers; `label` is added to every sample to name its source.

    Samples are not summed: a sum would drop when a process ends, which Prometheus takes for a counter reset.
    """
    families: dict[str, list[str]] = {}
    for who, text in texts.items():
        _, *parts = _HEAD.split(text)
        for head, name, samples in zip(parts[::3], parts[1::3], parts[2::3], strict=True):
            own = _SAMPLE.sub(lambda found, who=who: _labelled(found, label, who), samples)
            families.setdefault(name, [head]).append(own)
    return "".join(line for family in families.values() for line in family)


def _labelled(found: re.Match[str], label: str, who: str) -> str:
    name, brace = found.groups()
    return f'{name}{{{label}="{who}",' if brace else f'{name}{{{label}="{who}"}}'
