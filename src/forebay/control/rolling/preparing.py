"""Fetches revisions to this machine in the background: a slow download blocks nothing else."""

import asyncio
from collections.abc import Callable, Mapping
from typing import Final

from forebay.control.plan import Artifact
from forebay.control.rolling.values import DeployRefused, RevisionSource
from forebay.store.database import StoreError

RETRY_S: Final = 1.0
"""The first retry delay of a revision that is still wanted; it doubles each time."""
RETRY_MAX_S: Final = 30.0


class Preparer:
    """The prepared revisions, by model and revision."""

    def __init__(self, source: RevisionSource, note: Callable[[str, str], None]) -> None:
        self._source = source
        self._note = note
        self._artifacts: dict[str, dict[str, Artifact]] = {}
        self._again_at: dict[tuple[str, str], float] = {}
        self._pauses_s: dict[tuple[str, str], float] = {}
        self.refused: dict[tuple[str, str], str] = {}
        """What cannot be prepared, and why."""

    def of(self, model: str) -> Mapping[str, Artifact]:
        """The prepared revisions of a model."""
        return self._artifacts.get(model, {})

    def may_begin(self, model: str, revision: str) -> bool:
        """Whether to call `prepare` now: it is neither prepared nor in progress."""
        if revision in self.of(model):
            return False
        return asyncio.get_running_loop().time() >= self._again_at.get((model, revision), 0.0)

    def forget(self, model: str, revision: str) -> None:
        """Prepare it from scratch when it is wanted next, verifying every byte."""
        self._artifacts.get(model, {}).pop(revision, None)
        self._again_at.pop((model, revision), None)
        self._pauses_s.pop((model, revision), None)
        self.refused.pop((model, revision), None)

    async def prepare(self, model: str, revision: str) -> None:
        """Try once; errors are recorded."""
        key = model, revision
        self._again_at[key] = float("inf")
        try:
            self._artifacts.setdefault(model, {})[revision] = await self._source.prepare(model, revision)
            self.refused.pop(key, None)
        except DeployRefused as error:
            self.refused[key] = error.text
            self._note("not_prepared", f"{model}@{revision}: {error.text}")
        except StoreError as error:
            self._note("store_trouble", f"{model}@{revision} cannot be prepared: {error}")
        finally:
            pause_s = self._pauses_s.get(key, RETRY_S)
            self._pauses_s[key] = min(2 * pause_s, RETRY_MAX_S)
            self._again_at[key] = asyncio.get_running_loop().time() + pause_s
