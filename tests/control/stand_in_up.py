"""`forebay up` in a process of its own, over stand-ins instead of workers and gateways: FILE HOME."""

import signal
import sys
from pathlib import Path

from rich.console import Console
from tests.control.units import COMMANDS

from forebay.cli import build, settings, up
from forebay.core.cluster import Cluster

build.COMMANDS = COMMANDS  # type: ignore[assignment]
signal.signal(signal.SIGHUP, signal.SIG_DFL)  # whoever runs the tests may do so with nohup


def read() -> Cluster:
    return settings.load_cluster(settings.read_file(Path(sys.argv[1])), [], {}, otherwise="nothing was changed")


try:
    sys.exit(up.run_up(read(), Path(sys.argv[2]), Console(highlight=False), read))
except settings.UserError as error:
    sys.exit(str(error))
