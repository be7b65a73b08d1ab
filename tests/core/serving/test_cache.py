"""A cache under a budget of bytes."""

from collections import OrderedDict

from hypothesis import given
from hypothesis import strategies as st

from forebay.core.serving.cache import ENTRY_BYTES, ByteLru

BUDGET_BYTES = 4 * ENTRY_BYTES


@given(
    st.lists(
        st.tuples(st.sampled_from(["put", "put", "get", "drop"]), st.integers(0, 5), st.integers(0, BUDGET_BYTES)),
        max_size=60,
    )
)
def test_lru_cache_equals_a_naive_ordered_list(operations: list[tuple[str, int, int]]) -> None:
    cache: ByteLru[int, int] = ByteLru(BUDGET_BYTES)
    naive: OrderedDict[int, tuple[int, int]] = OrderedDict()
    for number, (operation, key, size) in enumerate(operations):
        if operation == "put":
            naive.pop(key, None)
            kept = size + ENTRY_BYTES <= BUDGET_BYTES
            assert cache.put(key, number, size) is kept
            if kept:
                naive[key] = (number, size + ENTRY_BYTES)
            while sum(each for _, each in naive.values()) > BUDGET_BYTES:
                naive.popitem(last=False)
        elif operation == "get":
            if key in naive:
                naive.move_to_end(key)
            assert cache.get(key) == naive.get(key, (None, 0))[0]
        else:
            naive.pop(key, None)
            cache.drop(key)
        assert cache.used_bytes == sum(each for _, each in naive.values()) <= BUDGET_BYTES
        assert len(cache) == len(naive)
    assert [cache.get(key) for key in naive] == [value for value, _ in naive.values()]
    cache.clear()
    assert (len(cache), cache.used_bytes) == (0, 0)


def test_cache_counts_evictions_but_not_replacements() -> None:
    cache: ByteLru[str, int] = ByteLru(2 * ENTRY_BYTES)
    for key in ("a", "b", "b", "c"):
        cache.put(key, 0, 0)
    assert cache.evictions == 1
    assert cache.get("a") is None
