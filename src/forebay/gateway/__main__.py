"""`python -m forebay.gateway SPEC.json`: one gateway. Exits 0 when drained, 1 without a port, 2 on bad arguments."""

import gc
import resource
import sys
from pathlib import Path

import msgspec
import uvloop

from forebay.core.model import GatewaySpec
from forebay.gateway.serve import NoPort, serve
from forebay.obs import log

GC_THRESHOLDS = (100_000, 20, 20)
"""Requests leave no reference cycles, so the collector finds little and may run rarely."""


def main(arguments: list[str]) -> int:
    """Run the gateway of a specification file."""
    if len(arguments) != 1:
        print("usage: python -m forebay.gateway SPEC.json", file=sys.stderr)
        return 2
    try:
        spec = msgspec.json.decode(Path(arguments[0]).read_bytes(), type=GatewaySpec)
    except (OSError, msgspec.DecodeError, UnicodeDecodeError) as error:
        print(f"{arguments[0]}: not a gateway specification: {error}", file=sys.stderr)
        return 2
    logger = log.configure(process="gateway", gateway=spec.id, generation=str(spec.generation))
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))  # the usual limit of 1,024 is below connections_max
    gc.collect()
    gc.freeze()
    gc.set_threshold(*GC_THRESHOLDS)
    try:
        uvloop.run(serve(spec, logger))
    except NoPort as error:
        print(f"gateway {spec.id}: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
