"""`python -m forebay.modelserver SPEC.json`: run one replica. Exits 0 when drained, 1 on failure, 2 on misuse."""

import sys
from pathlib import Path

import msgspec
import uvloop

from forebay.core.model import WorkerSpec
from forebay.modelserver.process.placement import take_turns
from forebay.modelserver.replica.serve import GaveUp, serve
from forebay.modelserver.tuning import tune_memory
from forebay.net.ports import NoPort
from forebay.obs import log


def main(arguments: list[str]) -> int:
    """Run the replica described by a specification file."""
    if len(arguments) != 1:
        print("usage: python -m forebay.modelserver SPEC.json", file=sys.stderr)
        return 2
    try:
        spec = msgspec.json.decode(Path(arguments[0]).read_bytes(), type=WorkerSpec)
    except (OSError, msgspec.DecodeError) as error:
        print(f"{arguments[0]}: not a specification of a replica: {error}", file=sys.stderr)
        return 2
    generation = str(spec.generation)
    logger = log.configure(process="modelserver", model=spec.model, replica=spec.replica, generation=generation)
    tune_memory()
    take_turns()
    try:
        uvloop.run(serve(spec, logger))
    except (GaveUp, NoPort) as error:
        print(f"replica {spec.replica}: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
