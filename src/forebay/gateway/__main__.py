"""`python -m forebay.gateway SPEC.json`: one gateway. Exits 0 when drained, 1 without a port, 2 on bad arguments."""

import gc
import resource
import sys
from dataclasses import replace
from pathlib import Path

import msgspec
import uvloop

from forebay.core.model import GatewaySpec
from forebay.gateway.serve import NoPort, serve
from forebay.obs import log

GC_THRESHOLDS = (100_000, 20, 20)
"""Requests leave no reference cycles, so the collector finds little and may run rarely."""
FILES_RESERVED = 128
"""File descriptors that are not for requests: records, polls of replicas, peers."""


def within(spec: GatewaySpec, files_max: int) -> GatewaySpec:
    """The specification for a process that may open so many files: each request may take two, one to its replica.

    Beyond that, idle connections are closed for new ones, instead of all work failing.
    """
    room = max(1, (files_max - FILES_RESERVED) // 2)
    if files_max == resource.RLIM_INFINITY or spec.limits.connections_max <= room:
        return spec
    return replace(spec, limits=replace(spec.limits, connections_max=room))


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
    allowed = within(spec, most)
    if allowed != spec:
        logger.warning(
            "fewer connections than set: too few file descriptors",
            connections_max=allowed.limits.connections_max,
            files_max=most,
        )
    gc.collect()
    gc.freeze()
    gc.set_threshold(*GC_THRESHOLDS)
    try:
        uvloop.run(serve(allowed, logger))
    except NoPort as error:
        print(f"gateway {spec.id}: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
