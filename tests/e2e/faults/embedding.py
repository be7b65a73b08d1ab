"""Clients of the demo's embedding model, which compare each answer with the first one."""

from typing import Any, ClassVar

import msgspec
import numpy as np
from tests.e2e.faults.load import Patient, Seen

ALIKE = 0.99
"""Cosine of two embeddings of one text, which need not have been in the same batch."""


class Embedder(Patient):
    """Has texts embedded, and compares what it gets with what anybody got first."""

    known: ClassVar[dict[int, np.ndarray[Any, Any]]] = {}

    def _question(self, seen: Seen) -> tuple[str, dict[str, Any]]:
        return "/v1/embeddings", {"input": f"Story number {seen.story}: it was at sea that I first saw her."}

    def _judge_whole(self, seen: Seen, body: bytes) -> None:
        try:
            vector = np.asarray(msgspec.json.decode(body)["data"][0]["embedding"], float)
        except (msgspec.DecodeError, LookupError, TypeError) as error:
            seen.error = f"status {seen.status}, no embedding: {error!r}"
            return
        known = self.known.setdefault(seen.story, vector)
        cosine = float(vector @ known / np.linalg.norm(vector) / np.linalg.norm(known))
        seen.text = f"{len(vector)} numbers"
        if not cosine >= ALIKE:
            seen.error = f"another vector: the cosine is {cosine}"
