"""Network namespaces as nodes that can be partitioned: each has one link, and runs only the node's own processes."""

import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import pytest
from tests.e2e.cluster import TEST_PROCESS

needs_networks = pytest.mark.skipif(
    os.geteuid() != 0 or shutil.which("ip") is None, reason="network namespaces need root, and iproute2's `ip`"
)


CABLE = "cable"
"""What its end is called in there."""


@dataclass(frozen=True, slots=True)
class Network:
    """A namespace that reaches this machine, and nothing else. `host`: its address."""

    name: str
    host: str

    def node(self, name: str) -> dict[str, Any]:
        """A node of a cluster whose replicas live there."""
        return {"name": name, "host": self.host, "launcher": ["ip", "netns", "exec", self.name]}

    def cut(self) -> None:
        """From now on nothing arrives. Pulled out at the other end: here the route stays, and leads nowhere."""
        _ip("-n", self.name, "link", "set", CABLE, "down")

    def mend(self) -> None:
        """All is as it was."""
        _ip("-n", self.name, "link", "set", CABLE, "up")


@contextmanager
def network() -> Iterator[Network]:
    """A namespace; another one in each test process."""
    name, subnet = f"forebay-{TEST_PROCESS}", f"10.231.{TEST_PROCESS}"
    subprocess.run(["ip", "netns", "delete", name], check=False, capture_output=True)  # of a test that was killed
    _ip("netns", "add", name)
    try:
        _ip("link", "add", name, "type", "veth", "peer", "name", CABLE, "netns", name)
        _ip("address", "add", f"{subnet}.1/30", "dev", name)
        _ip("link", "set", name, "up")
        _ip("-n", name, "address", "add", f"{subnet}.2/30", "dev", CABLE)
        for device in ("lo", CABLE):
            _ip("-n", name, "link", "set", device, "up")
        yield Network(name, f"{subnet}.2")
    finally:
        _ip("netns", "delete", name)  # and the cable


def _ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True, text=True)
