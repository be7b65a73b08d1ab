"""Runs a model server in the foreground."""

import asyncio
import signal
import sys
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path

import structlog
import uvloop
from rich.console import Console

from forebay.cli.repository.screen import Screen
from forebay.cli.settings import INTERRUPTED, UserError
from forebay.modelserver.process.placement import take_turns
from forebay.modelserver.serve import NotStarted, Plan, Watcher, serve
from forebay.modelserver.telemetry.logs import LogSettings
from forebay.modelserver.tuning import tune_memory
from forebay.obs import log as logging


def run_server(plan: Plan, settings: LogSettings, console: Console, idle: Sequence[str] = ()) -> int:
    """Run until Ctrl-C or SIGTERM; returns the exit code. Raises `UserError` for errors that the user can fix.

    `idle`: options that were given but have no effect.
    """
    path = str(settings.document()["log_file"])
    screen = Screen(console, plan)
    with ExitStack() as files:
        try:
            stream = files.enter_context(Path(path).open("a", encoding="utf-8", buffering=1)) if path else None
        except OSError as error:
            raise UserError(f"--log-file {path}: {error.strerror}") from error
        log = logging.configure(stream)
        if stream is None and sys.stderr.isatty():
            _log_readably()
        settings.install()
        if idle:
            log.warning("tritonserver options without effect", options=list(idle))
        screen.start()
        tune_memory()
        take_turns()
        try:
            uvloop.run(_until_stopped(plan, settings, log, screen))
        except NotStarted as error:
            raise UserError(f"{error}\nNothing is served.") from error
        except asyncio.CancelledError:
            return INTERRUPTED
        finally:
            screen.stop_status()
    screen.stopped()
    return 0


async def _until_stopped(
    plan: Plan, settings: LogSettings, log: structlog.stdlib.BoundLogger, screen: Screen
) -> None:
    stop, loop, me = asyncio.Event(), asyncio.get_running_loop(), asyncio.current_task()
    assert me is not None

    def on_signal() -> None:
        if stop.is_set():
            me.cancel()
        else:
            screen.stopping(plan.drain_s)
            stop.set()

    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, on_signal)
    loop.add_signal_handler(signal.SIGHUP, lambda: None)  # closing the terminal must not stop the server
    await serve(plan, settings, log, stop, Watcher(screen.loading, screen.ready))


def _log_readably() -> None:
    """Log lines for people instead of JSON."""
    processors = [
        each
        for each in structlog.get_config()["processors"]
        if each is not structlog.processors.format_exc_info
        and not isinstance(each, structlog.processors.JSONRenderer)
    ]
    structlog.configure(processors=[*processors, structlog.dev.ConsoleRenderer()])
