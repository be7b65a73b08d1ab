"""`python -m forebay.worker SPEC.json`: runs one replica. Exits 0 when drained, 1 on failure, 2 on wrong usage."""

import sys
from pathlib import Path

import msgspec
import uvloop

from forebay.core.model import WorkerSpec
from forebay.net.ports import NoPort
from forebay.obs import log
from forebay.worker.engine_process import GaveUp
from forebay.worker.serve import serve


def main(arguments: list[str]) -> int:
    """Run the worker described by a specification file."""
    if len(arguments) != 1:
        print("usage: python -m forebay.worker SPEC.json", file=sys.stderr)
        return 2
    try:
        spec = msgspec.json.decode(Path(arguments[0]).read_bytes(), type=WorkerSpec)
    except (OSError, msgspec.DecodeError) as error:
        print(f"{arguments[0]}: not a worker specification: {error}", file=sys.stderr)
        return 2
    logger = log.configure(process="worker", model=spec.model, replica=spec.replica, generation=str(spec.generation))
    try:
        uvloop.run(serve(spec, logger))
    except (GaveUp, NoPort) as error:
        print(f"worker {spec.replica}: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
