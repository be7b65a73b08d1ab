"""The response cache, keyed by request content, with Triton's rule: complete responses of models with
`response_cache`.

Unlike Triton's, the key covers input shapes and requested outputs, so that requests that differ only there never
share a response.
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
"""Keeps clients from constructing requests with colliding keys."""


class CachedResponse(NamedTuple):
    """A cached response."""

    outputs: tuple[Tensor, ...]
    parameters: dict[str, Parameter]


Cache = ByteLru[bytes, CachedResponse]
"""One for the whole server."""


class VersionCache:
    """Cached responses of one model version, valid since the last load of it or of a model that it depends on."""

    def __init__(self, cache: Cache, model: str, version: str, load: int, counts: Counts) -> None:
        self._cache = cache
        self._model = model
        self._version = version
        self._load = load
        self._counts = counts

    def find(self, call: Call) -> InferResponse | None:
        """Look up the response to an identical request; counts hits. None: run the model."""
        start_ns = monotonic_ns()
        call.cache_key = key_of(self._model, self._version, self._load, call.checked)
        kept = self._cache.get(call.cache_key)
        call.cache_ns = monotonic_ns() - start_ns
        self._cache.lookup_ns += call.cache_ns
        if kept is None:
            self._cache.misses += 1
            return None
        self._cache.hits += 1
        self._counts.hit(call, start_ns, call.cache_ns)
        return InferResponse(self._model, self._version, call.request.id, kept.outputs, parameters=kept.parameters)

    def keep(self, call: Call, response: InferResponse) -> None:
        """Cache the model's response; counts the miss."""
        start_ns = monotonic_ns()
        if self._cache.get(call.cache_key) is None:
            outputs = response.copied().outputs
            size = sum(size_bytes(tensor.data) for tensor in outputs)
            self._cache.put(call.cache_key, CachedResponse(outputs, response.parameters), size)
            insertion_ns = monotonic_ns() - start_ns
            self._cache.insertion_ns += insertion_ns
            self._counts.miss(call.cache_ns + insertion_ns)


def key_of(model: str, version: str, load: int, checked: Checked) -> bytes:
    """The cache key; `load` keeps apart responses from before and after a reload."""
    digest = xxh3_128(repr((model, version, load, checked.outputs)).encode(), seed=_SEED)
    for tensor in sorted(checked.inputs, key=lambda tensor: tensor.name):
        digest.update(repr((tensor.name, tensor.datatype, tensor.shape, size_bytes(tensor.data))).encode())
        digest.update(tensor.data)
    return digest.digest()
