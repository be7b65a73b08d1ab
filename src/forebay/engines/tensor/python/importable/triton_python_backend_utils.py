"""The API of Triton's Python backend, in a process that `multiprocessing` has started anew (spawn, forkserver)."""

import sys

from forebay.engines.tensor.python import triton_api

sys.modules[__name__] = triton_api
