"""The cause of a replica's death, by its exit status and last log lines."""

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
"""Signs of failed allocations, in lower case: of CUDA, C++, Python, the C library and the kernel."""


def harm_of(words: str) -> Harm:
    """A crash, or one due to lack of memory. A plain SIGKILL by the kernel's OOM killer cannot be told from any
    other."""
    lower = words.lower()
    return Harm.OUT_OF_MEMORY if any(sign in lower for sign in SIGNS) else Harm.CRASH
