"""What `forebay up` prints while a cluster starts, and once it is ready."""

import asyncio
import os

from forebay.cli.build import Parts
from forebay.cli.reload import Reloader
from forebay.cli.view.screen import Screen
from forebay.control.loop import Controller
from forebay.control.plan import Plan
from forebay.control.status import Status, make_status
from forebay.core.model import Task
from forebay.obs.clock import wall_s
from forebay.wire.http1 import authority

SHOW_EVERY_S = 0.2
STOPS = "Ctrl-C stops the cluster."
ACCESS = {
    "off": "no API key needed; reachable from this machine only (gateway.auth: off)",
    "open": "no API key needed; open to anyone who can reach it (gateway.auth: open)",
    "keys": "API key required; `forebay keys create --tenant NAME` creates one",
}
"""The meaning of the values of `gateway.auth`."""


def has_terminal() -> bool:
    """Whether there is a controlling terminal. Closing it sends SIGHUP, which then means to stop."""
    try:
        os.close(os.open("/dev/tty", os.O_RDWR | os.O_NOCTTY))
    except OSError:
        return False
    return True


async def reload_on(asked: asyncio.Event, reload: Reloader) -> None:
    """Reload the cluster file whenever asked; several requests at once count as one."""
    while True:
        await asked.wait()
        asked.clear()
        await reload("SIGHUP")


def _status(control: Controller) -> Status:
    return make_status(control, asyncio.get_running_loop().time(), wall_s())


async def show(parts: Parts, screen: Screen, began: float, admin: tuple[str, int]) -> None:
    """Show the progress of the start, then the addresses once everything is ready."""
    await parts.control.look()
    if screen.adopted:
        screen.line(f"adopted {screen.adopted} running processes")
    while not (status := _status(parts.control)).complete:
        screen.starting(status)
        await asyncio.sleep(SHOW_EVERY_S)
    screen.stop_bars()
    screen.line(f"\nready after {wall_s() - began:.1f} s\n", "bold green")
    screen.line(f"  OpenAI API  {parts.plan.gateway_url}/v1")
    if parts.plan.gateway_url.startswith("https:"):
        screen.line("  TLS         clients must use a name in the certificate, and trust its CA (curl --cacert)")
    screen.line(f"  access      {ACCESS[parts.plan.auth]}")
    asks = "; key required: forebay keys create --admin ROLE" if parts.reload.cluster.admin.auth == "keys" else ""
    screen.line(f"  admin API   http://{authority(admin[0], admin[1])}/v1/status{asks}")
    screen.line(f"\n{_example(parts.plan)}\n")
    several = parts.control.leading is not None
    screen.line("Ctrl-C hands over to another controller, or stops the cluster." if several else STOPS, "dim")
    if parts.reload.read is not None:
        screen.line("`forebay reload` applies changes of its file.", "dim")


def _example(plan: Plan) -> str:
    """An example request for the shell."""
    routes = [model.routes for model in plan.models]
    model = next((r for r in routes if r.task is Task.CHAT), routes[0])
    key = ' \\\n  -H "authorization: Bearer $FOREBAY_API_KEY"' if plan.auth == "keys" else ""
    if model.task is Task.TENSOR:
        return f"curl {plan.gateway_url}/v2/models/{model.name}{key}"
    if model.task is Task.CHAT:
        path, rest = (
            "chat/completions",
            '"messages": [{"role": "user", "content": "Say hello."}], "max_tokens": 32, "temperature": 0',
        )
    else:
        path, rest = "embeddings", '"input": "A forebay feeds the turbines."'
    body = f'{{"model": "{model.name}", {rest}}}'
    return f"curl {plan.gateway_url}/v1/{path} \\\n  -H 'content-type: application/json'{key} \\\n  -d '{body}'"
