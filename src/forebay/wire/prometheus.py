"""Several expositions in Prometheus' text format made into one."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Final, Literal

from prometheus_client import generate_latest
from prometheus_client.core import Metric
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.samples import Sample

Rule = Literal["sum", "min", "max"]
_MERGE: Final[dict[Rule, Callable[[float, float], float]]] = {"sum": lambda a, b: a + b, "min": min, "max": max}


class _Families:
    def __init__(self, families: Iterable[Metric]) -> None:
        self._families = families

    def collect(self) -> Iterator[Metric]:
        yield from self._families


def _parsed(text: str) -> list[Metric]:
    try:
        return list(text_string_to_metric_families(text))
    except LookupError as error:  # that is how the parser finds that some lines are none
        raise ValueError(f"no exposition: {error}") from error


def merge(texts: Iterable[str], rules: Mapping[str, Rule]) -> bytes:
    """One exposition out of many. Values of the same name and labels are summed, unless `rules` names the metric.

    Raises ValueError if one of them is no exposition.
    """
    families: dict[str, Metric] = {}
    values: dict[str, dict[tuple[str, tuple[tuple[str, str], ...]], float]] = {}
    for text in texts:
        for family in _parsed(text):
            merge_two = _MERGE[rules.get(family.name, "sum")]
            families.setdefault(family.name, family)
            mine = values.setdefault(family.name, {})
            for sample in family.samples:
                key = sample.name, tuple(sample.labels.items())
                value = float(sample.value)
                mine[key] = merge_two(mine[key], value) if key in mine else value
    for name, family in families.items():
        family.samples = [Sample(sample, dict(labels), value) for (sample, labels), value in values[name].items()]
    return generate_latest(_Families(families.values()))
