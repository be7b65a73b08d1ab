"""Output of `forebay up`: progress bars on a terminal, plain lines elsewhere."""

import time
from collections.abc import Callable
from types import TracebackType
from typing import TYPE_CHECKING, Self

from rich.console import Console
from rich.progress import BarColumn, Progress, SpinnerColumn, TaskID, TextColumn, TimeElapsedColumn
from rich.text import Text

from forebay.core.lifecycle import Event
from forebay.core.model import ReplicaState

if TYPE_CHECKING:  # commands of the registry, too, show progress, and start without a control plane
    from forebay.control.journal import JournalEvent
    from forebay.control.status import Status

PLAIN_EVERY_S = 5.0
REDRAW_EVERY_S = 0.1
WORDS_LINES_MAX = 12
QUIET = (Event.LOADS.value, Event.PLACED.value, Event.ADOPTED.value)
"""Events that the bars show, or that need no attention."""


class Screen:
    """Prints for the user. Losing the terminal stops nothing else."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._bars = Progress(
            SpinnerColumn(),
            TextColumn("{task.description}", markup=False),
            BarColumn(bar_width=30),
            TextColumn("{task.fields[note]}", markup=False),
            TimeElapsedColumn(),
            console=console,
            auto_refresh=False,
            transient=True,
        )
        self._tasks: dict[str, TaskID] = {}
        self._moving = False
        self._gone = False
        self._drawn = 0.0
        self._words: dict[str, str] = {}
        self.adopted = 0

    def __enter__(self) -> Self:
        if self._console.is_terminal:
            self._safely(self._bars.start)
            self._moving = True
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop_bars()

    def stop_bars(self) -> None:
        """Remove the bars; lines are still printed."""
        if self._moving:
            self._moving = False
            self._safely(self._bars.stop)

    def line(self, text: str, style: str | None = None) -> None:
        """Print a line without wrapping, so that it can be copied."""
        self._safely(lambda: self._console.print(Text(text, style or ""), soft_wrap=True))

    def progress(self, model: str) -> Callable[[str, int, int | None], None]:
        """The progress callback for preparing a model."""
        last_stage, said_at = "", 0.0

        def report(stage: str, done: int, total: int | None) -> None:
            note = f"{_size(done)} of {_size(total)}" if total else (_size(done) if done else "")
            if self._moving:
                self._bar(model, f"{model}: {stage}", note, done, total)
                return
            nonlocal last_stage, said_at
            now = time.monotonic()
            if stage != last_stage or now - said_at >= PLAIN_EVERY_S:
                last_stage, said_at = stage, now
                self.line(f"{model}: {stage}{f', {note}' if done else ''}")

        return report

    def done(self, model: str) -> None:
        """Remove the bar of a model or a unit."""
        task = self._tasks.pop(model, None)
        if task is not None:
            self._bars.remove_task(task)

    def starting(self, status: "Status") -> None:
        """Show the progress of starting units."""
        if not self._moving:
            return
        for unit in [*status.gateways, *(r for m in status.models for r in m.replicas)]:
            if unit.state is ReplicaState.READY:
                self.done(unit.id)
            else:
                self._bar(unit.id, f"{unit.id}: {unit.state}", unit.why, 0, None)

    def event(self, event: "JournalEvent") -> None:
        """Print an event, if it matters."""
        if event.kind == Event.ADOPTED.value:
            self.adopted += 1
        if event.kind in QUIET:
            return
        style = {"ready": "green", "degraded": "yellow", "quarantined": "red", "stopped": "yellow"}.get(event.state)
        subject = f"{event.unit}: " if event.unit else ""
        state = f"{event.state}: " if event.state and event.why != event.state else ""
        self.line(f"{subject}{state}{event.why}", style)
        words = event.last_words.strip()
        if words and self._words.get(event.unit) != words:
            self._words[event.unit] = words
            self.line("\n".join(f"    {line}" for line in words.splitlines()[-WORDS_LINES_MAX:]), "dim")

    def _bar(self, name: str, description: str, note: str, done: int, total: int | None) -> None:
        if name not in self._tasks:
            self._tasks[name] = self._bars.add_task(description, total=total, note=note)
        self._bars.update(self._tasks[name], description=description, completed=done, total=total, note=note)
        now = time.monotonic()
        if now - self._drawn >= REDRAW_EVERY_S:
            self._drawn = now
            self._safely(self._bars.refresh)

    def _safely(self, show: Callable[[], object]) -> None:
        if self._gone:
            return
        try:
            show()
        except (OSError, SystemExit):  # rich raises SystemExit for a closed pipe, but units still need this process
            self._gone = True


def _size(count: int) -> str:
    return f"{count / 1e6:.1f} MB" if count >= 100_000 else str(count)
