"""Which slot of a llama.cpp server a prompt gets, and what is said of all slots."""

from dataclasses import dataclass, field

from forebay.engines.llamacpp.slots import Slots
from forebay.engines.protocol import Cached


@dataclass
class Prompt:
    ids: list[int]
    blocks: tuple[int, ...] = ()
    slot: int = field(default=-1)

    @property
    def cells(self) -> int:
        return len(self.ids)


def run(slots: Slots, prompt: Prompt) -> int:
    begin(slots, prompt)
    slots.free(prompt)
    return prompt.slot


def begin(slots: Slots, prompt: Prompt) -> None:
    prompt.slot = slots.take(prompt.ids)
    slots.fill(prompt)


def test_a_prompt_goes_to_the_slot_that_caches_most_of_it_else_the_least_recently_used() -> None:
    slots = Slots(3)
    long, short = [*range(200)], [*range(100), *range(500, 600)]
    assert [run(slots, Prompt(long)), run(slots, Prompt([7] * 200)), run(slots, Prompt([8] * 200))] == [0, 1, 2]
    assert run(slots, Prompt(short)) == 0
    assert run(slots, Prompt([9] * 200)) == 1
    assert run(slots, Prompt([*short, 1, 2, 3])) == 0
    assert run(slots, Prompt([8] * 50)) == 2, "too little to be taken from the cache: where nobody was for longest"


def test_a_busy_slot_is_not_reused() -> None:
    slots = Slots(2)
    first, second = Prompt([1] * 100), Prompt([1] * 100)
    begin(slots, first)
    begin(slots, second)
    assert {first.slot, second.slot} == {0, 1}
    slots.free(second)
    assert slots.take([1] * 100) == second.slot


def test_what_all_slots_hold_is_told_once() -> None:
    slots = Slots(2)
    run(slots, Prompt([1] * 100, (1, 2)))
    assert slots.news() == Cached((1, 2), ())
    assert slots.news() is None
    run(slots, Prompt([2] * 100, (1, 3)))
    assert slots.news() == Cached((3,), ())
    run(slots, Prompt([3] * 100, (4,)))
    assert slots.news() == Cached((4,), (2,))


def test_the_cache_of_a_prompt_cancelled_during_prefill_is_unknown() -> None:
    slots = Slots(1)
    run(slots, Prompt([1] * 100, (1,)))
    gone = Prompt([1] * 90 + [2], (1, 2))
    gone.slot = slots.take(gone.ids)
    assert slots.news() == Cached((1,), ())
    slots.free(gone)
    assert slots.news() == Cached((), (1,))


def test_the_first_of_the_idle_slots_are_emptied_for_those_that_run() -> None:
    slots = Slots(3)
    for n in range(3):
        run(slots, Prompt([n] * 100, (n,)))
    busy = Prompt([0] * 100, (0,))
    begin(slots, busy)
    assert slots.news() == Cached((0, 1, 2), ())
    slots.purge(150)
    assert slots.news() == Cached((), (1,))
