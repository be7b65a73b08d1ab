"""What a replica has died of, by what is left of it: the words of its end, and its last lines."""

from typing import Final

from forebay.core.rollout.guards import Harm

SIGNS: Final = (
    "out of memory",
    "out_of_memory",
    "std::bad_alloc",
    "memoryerror",
    "cannot allocate memory",
    "oom-kill",
)
"""Of memory that was not to be had, in lower case: of CUDA, C++, Python, the C library and the kernel."""


def harm_of(words: str) -> Harm:
    """A crash, or one for lack of memory. A kernel that kills without a word cannot be told from anybody else."""
    lower = words.lower()
    return Harm.OUT_OF_MEMORY if any(sign in lower for sign in SIGNS) else Harm.CRASH
