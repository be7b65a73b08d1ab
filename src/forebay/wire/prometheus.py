"""Expositions of several processes in Prometheus' text format as one."""

import re
from collections.abc import Mapping
from typing import Final

from prometheus_client.parser import text_string_to_metric_families

_SAMPLE: Final = re.compile(r"^(\w+)(\{?)", re.MULTILINE)
_HEAD: Final = re.compile(r"^(# HELP (\S+).*\n(?:# TYPE .*\n)?)", re.MULTILINE)


def check(text: str) -> None:
    """Raises ValueError for what is no exposition."""
    try:
        for family in text_string_to_metric_families(text):
            for sample in family.samples:
                float(sample.value)
    except LookupError as error:  # that is how the parser finds that some lines are none
        raise ValueError(f"no exposition: {error}") from error


def together(texts: Mapping[str, str], label: str) -> str:
    """One exposition out of many, of which each has its own heads; `label` says of every sample whose it is.

    They are not added up: a sum would fall when a process ends, which is to Prometheus as if all began anew.
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
