"""The runtime behind plain sockets, with nothing of what makes a server: what is left for one that costs nothing.

python bench/server/bare_http.py LIBRARY PORT FILES INPUT WIDTH BATCH HEAD

LIBRARY: `sockets.c`, compiled. FILES: separated by colons; they run one after the other. WIDTH: of the input, INT64.
BATCH: requests at once at most; BENCH_ROWS of the environment is how many rows run at a time. They are answered
together. HEAD: a file with what a response has before the bytes of the outputs.
"""

import ctypes
import os
import sys
from pathlib import Path
from typing import Any, Final

import numpy as np
from peers.chain import Chain

TOKEN: Final = 101
"""A value that each model takes."""


def main() -> None:
    """Serve until the process is ended."""
    library, port, files, name, width, batch, head_file = sys.argv[1:]
    most, head = int(batch), Path(head_file).read_bytes()
    sockets = ctypes.CDLL(library)
    chain = Chain(files.split(":"), pattern=False)  # as Forebay's model processes have it
    rows = np.full((most, int(width)), TOKEN, np.int64)
    size = int(os.environ["BENCH_ROWS"])
    whole = [np.zeros((most, *made.shape[1:]), made.dtype) for made in chain.run({name: rows[:1]})]
    arrays = (ctypes.c_void_p * len(whole))(*[array.ctypes.data for array in whole])
    widths = (ctypes.c_int * len(whole))(*[array[0].nbytes for array in whole])
    descriptors = (ctypes.c_int * most)()
    into = ctypes.c_void_p(rows.ctypes.data)
    sockets.listen_on(int(port), head, len(head), rows[0].nbytes)
    while True:
        count = sockets.collect(most, into, descriptors)
        for start in range(0, count, size):
            end = min(start + size, count)
            made: list[Any] = chain.run({name: rows[start:end]})
            for array, part in zip(whole, made, strict=True):
                array[start:end] = part
        sockets.respond(count, descriptors, len(whole), arrays, widths)


if __name__ == "__main__":
    main()
