"""The response cache: answers by what was asked. Triton's rule: whole answers of models that say `response_cache`.

Unlike Triton's, the key has the shapes and the wanted outputs in it, so that requests that differ only there never
get one another's answer.
"""

import secrets
from time import monotonic_ns
from typing import Final, NamedTuple

from xxhash import xxh3_128

from forebay.core.serving.cache import ByteLru
from forebay.core.serving.values import InferResponse, Parameter, Tensor
from forebay.modelserver.models.running.call import Call
from forebay.modelserver.models.running.counting import Counts
from forebay.modelserver.models.running.inputs import Checked, size_bytes

_SEED: Final = secrets.randbits(64)
"""So that nobody outside can look for two questions with one key."""


class Kept(NamedTuple):
    """An answer in the cache."""

    outputs: tuple[Tensor, ...]
    parameters: dict[str, Parameter]


Cache = ByteLru[bytes, Kept]
"""Of the whole server."""


class Answers:
    """What the cache has of one model version since a load, its own or that of a model that it needs."""

    def __init__(self, cache: Cache, model: str, version: str, load: int, counts: Counts) -> None:
        self._cache = cache
        self._model = model
        self._version = version
        self._load = load
        self._counts = counts

    def find(self, call: Call) -> InferResponse | None:
        """The answer that another request has got to the same question; counted. None: ask the model."""
        start_ns = monotonic_ns()
        call.cache_key = key_of(self._model, self._version, self._load, call.checked)
        kept = self._cache.get(call.cache_key)
        call.cache_ns = monotonic_ns() - start_ns
        if kept is None:
            return None
        self._counts.hit(call, start_ns, call.cache_ns)
        return InferResponse(self._model, self._version, call.request.id, kept.outputs, parameters=kept.parameters)

    def keep(self, call: Call, response: InferResponse) -> None:
        """Remember the answer that the model has given; counted."""
        start_ns = monotonic_ns()
        if self._cache.get(call.cache_key) is None:
            outputs = response.copied().outputs
            size = sum(size_bytes(tensor.data) for tensor in outputs)
            self._cache.put(call.cache_key, Kept(outputs, response.parameters), size)
            self._counts.miss(call.cache_ns + monotonic_ns() - start_ns)


def key_of(model: str, version: str, load: int, checked: Checked) -> bytes:
    """What an answer is kept under; `load` tells apart what one version was before and after it was reloaded."""
    digest = xxh3_128(repr((model, version, load, checked.outputs)).encode(), seed=_SEED)
    for tensor in sorted(checked.inputs, key=lambda tensor: tensor.name):
        digest.update(repr((tensor.name, tensor.datatype, tensor.shape, size_bytes(tensor.data))).encode())
        digest.update(tensor.data)
    return digest.digest()
