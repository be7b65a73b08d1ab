"""Which versions of a model are served, and what changes with its folder or policy."""

from collections.abc import Collection
from typing import NamedTuple

from forebay.core.serving.config import VersionPolicy, VersionRule


def chosen_versions(policy: VersionPolicy, found: Collection[int]) -> tuple[int, ...]:
    """The versions among `found` that the policy selects, ascending.

    An empty result is not an error here: Triton's answer is `none_available`. See also `missing`.
    """
    if policy.rule is VersionRule.SPECIFIC:
        return tuple(sorted(set(policy.versions).intersection(found)))
    ordered = sorted(set(found))
    if policy.rule is VersionRule.ALL:
        return tuple(ordered)
    return tuple(ordered[max(0, len(ordered) - policy.count) :])


def missing(policy: VersionPolicy, found: Collection[int]) -> tuple[int, ...]:
    """Versions that the policy names but the folder lacks, ascending: worth a warning."""
    if policy.rule is not VersionRule.SPECIFIC:
        return ()
    return tuple(sorted(set(policy.versions).difference(found)))


def none_available(model: str) -> str:
    """Error text for a load that would serve no version (Triton's text)."""
    return f"at least one version must be available under the version policy of model '{model}'"


class Change(NamedTuple):
    """Versions, ascending, to be loaded, left as they are, and unloaded."""

    load: tuple[int, ...]
    keep: tuple[int, ...]
    unload: tuple[int, ...]


def change(served: Collection[int], chosen: Collection[int], changed: Collection[int] = ()) -> Change:
    """The change from the served to the chosen versions. `changed` ones, with new files or settings, are reloaded."""
    now, wanted, new = set(served), set(chosen), set(changed)
    return Change(
        load=tuple(sorted(wanted - now | wanted & new)),
        keep=tuple(sorted(now & wanted - new)),
        unload=tuple(sorted(now - wanted)),
    )
