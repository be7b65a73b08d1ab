"""Which versions of a model are served, and what changes when its folder or its policy has."""

from collections.abc import Collection
from typing import NamedTuple

from forebay.core.serving.config import VersionPolicy, VersionRule


def chosen_versions(policy: VersionPolicy, found: Collection[int]) -> tuple[int, ...]:
    """The versions among those `found` that the policy wants, ascending.

    That there are none is no failure here: Triton's answer is `none_available`. See also `missing`.
    """
    if policy.rule is VersionRule.SPECIFIC:
        return tuple(sorted(set(policy.versions).intersection(found)))
    ordered = sorted(set(found))
    if policy.rule is VersionRule.ALL:
        return tuple(ordered)
    return tuple(ordered[max(0, len(ordered) - policy.count) :])


def missing(policy: VersionPolicy, found: Collection[int]) -> tuple[int, ...]:
    """Versions that the policy names but the folder does not have, ascending: to be warned of."""
    if policy.rule is not VersionRule.SPECIFIC:
        return ()
    return tuple(sorted(set(policy.versions).difference(found)))


def none_available(model: str) -> str:
    """What a load is refused with that would serve no version (Triton's text)."""
    return f"at least one version must be available under the version policy of model '{model}'"


class Change(NamedTuple):
    """Versions, ascending, to be loaded, left as they are, and unloaded."""

    load: tuple[int, ...]
    keep: tuple[int, ...]
    unload: tuple[int, ...]


def change(served: Collection[int], chosen: Collection[int], changed: Collection[int] = ()) -> Change:
    """From what is served to what is chosen. `changed` ones, whose files or settings are new, are loaded again."""
    now, wanted, new = set(served), set(chosen), set(changed)
    return Change(
        load=tuple(sorted(wanted - now | wanted & new)),
        keep=tuple(sorted(now & wanted - new)),
        unload=tuple(sorted(now - wanted)),
    )
