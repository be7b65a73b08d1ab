"""Output of `forebay serve --repository`: loading progress, then addresses and an example request."""

import json
from collections.abc import Sequence
from typing import Final

from rich.console import Console
from rich.markup import escape
from rich.status import Status
from rich.table import Table

from forebay.core.serving.config import Datatype, ModelConfig
from forebay.modelserver.ports import IndexEntry
from forebay.modelserver.serve import Plan, Ready

SHOWN_MODELS_MAX: Final = 40
SHOWN_LOADING_MAX: Final = 4
EXAMPLE_ELEMENTS_MAX: Final = 16
_ZEROS: Final = {Datatype.BOOL: False, Datatype.BYTES: "hello", Datatype.FP32: 0.5, Datatype.FP64: 0.5}
"""Example values that are not integers. Types without a JSON form get no example."""
_NOT_JSON: Final = (Datatype.FP16, Datatype.BF16)
_STYLES: Final = {"READY": "green", "UNAVAILABLE": "red"}


class Screen:
    """Prints for the user."""

    def __init__(self, console: Console, plan: Plan) -> None:
        self._console = console
        self._plan = plan
        self._status: Status | None = None

    def start(self) -> None:
        """Print what will be served."""
        folders = ", ".join(str(folder) for folder in self._plan.models.repositories)
        self._console.print(
            f"[bold]forebay {self._plan.front.version}[/]: model repository {escape(folders)}", soft_wrap=True
        )
        if self._console.is_terminal:
            self._status = self._console.status("loading")
            self._status.start()

    def stop_status(self) -> None:
        """Stop the spinner; lines are still printed."""
        if self._status is not None:
            self._status.stop()
            self._status = None

    def loading(self, models: Sequence[IndexEntry]) -> None:
        """Show loading progress."""
        if self._status is None:
            return
        loading = [each.name for each in models if each.state == "LOADING"]
        done = len({each.name for each in models if each.state == "READY"})
        rest = ", …" if len(loading) > SHOWN_LOADING_MAX else ""
        names = escape(", ".join(loading[:SHOWN_LOADING_MAX]))
        self._status.update(f"{done} of {len({each.name for each in models})} ready; loading {names}{rest}")

    def ready(self, ready: Ready) -> None:
        """Print what is served, and where."""
        self.stop_status()
        show = self._console.print
        if ready.index:
            show(_models(ready.index))
        show(f"\n[bold green]ready after {ready.seconds:.1f} s[/]\n")
        lines = [
            ("HTTP", f"http://{ready.http}/v2" if ready.http else ""),
            ("gRPC", ready.grpc),
            ("metrics", f"http://{ready.metrics or ready.http}/metrics" if ready.metrics or ready.http else ""),
        ]
        for name, where in lines:
            if where:
                show(f"  {name:<8} {where}", soft_wrap=True)
        if self._plan.listen.host in ("127.0.0.1", "localhost", "::1"):
            show("           reachable from this machine only; `--host 0.0.0.0` makes it reachable from the network")
        if ready.http:
            self._console.print(f"\n{_example(ready)}\n", soft_wrap=True, markup=False)
        show("[dim]Ctrl-C finishes running requests, and stops.[/]")

    def stopping(self, seconds: float) -> None:
        """Print that the server is stopping."""
        self.stop_status()
        self._console.print(f"stopping: running requests get up to {seconds:g} s; Ctrl-C again stops at once")

    def stopped(self) -> None:
        """Print that the server has stopped."""
        self._console.print("stopped; no process is left")


def example_request(config: ModelConfig) -> dict[str, object] | None:
    """A small example request for a model; None if it does not fit on a line."""
    inputs = []
    for spec in config.inputs:
        if spec.optional:
            continue
        shape = [1] * (config.max_batch > 0) + [max(1, dim) for dim in spec.dims]
        elements = 1
        for dim in shape:
            elements *= dim
        if spec.datatype in _NOT_JSON or elements > EXAMPLE_ELEMENTS_MAX:
            return None
        value = _ZEROS.get(spec.datatype, 1)
        inputs.append({"name": spec.name, "datatype": spec.datatype, "shape": shape, "data": [value] * elements})
    return {"inputs": inputs}


def _models(index: Sequence[IndexEntry]) -> Table:
    table = Table("model", "version", "state", "reason", box=None, pad_edge=False)
    known = [each for each in index if each.state]
    for each in known[:SHOWN_MODELS_MAX]:
        style = _STYLES.get(each.state, "")
        state = f"[{style}]{each.state}[/]" if style else each.state
        table.add_row(escape(each.name), each.version, state, escape(each.reason))
    if len(known) > SHOWN_MODELS_MAX:
        table.add_row("…", "", f"{len(known) - SHOWN_MODELS_MAX} more", "")
    if len(index) > len(known):
        table.add_row("…", "", f"{len(index) - len(known)} not loaded", "")
    return table


def _example(ready: Ready) -> str:
    """An example request for the shell."""
    for config in ready.configs:
        request = None if config.decoupled or config.sequences else example_request(config)
        if request is not None:
            body = json.dumps(request).replace("'", "'\\''")
            return f"curl http://{ready.http}/v2/models/{config.name}/infer \\\n  -d '{body}'"
    return f"curl -X POST http://{ready.http}/v2/repository/index"
