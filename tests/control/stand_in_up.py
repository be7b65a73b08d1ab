"""`forebay up` in a process of its own, over stand-ins instead of workers and gateways: FILE HOME."""

import sys
from pathlib import Path

from rich.console import Console
from tests.control.units import COMMANDS

from forebay.cli import build, settings, up

build.COMMANDS = COMMANDS  # type: ignore[assignment]
source = settings.read_file(Path(sys.argv[1]))
try:
    sys.exit(up.run_up(settings.load_cluster(source, [], {}), Path(sys.argv[2]), Console(highlight=False)))
except settings.UserError as error:
    sys.exit(str(error))
