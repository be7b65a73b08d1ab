"""`forebay reload`: asks the running cluster to reload its cluster file, and prints the result."""

from rich.console import Console
from rich.text import Text

from forebay.cli.deploy.client import Admin
from forebay.cli.reload import summary
from forebay.cli.settings import UserError
from forebay.control.changes import Reloaded


def reload(admin: Admin, screen: Console) -> int:
    """Request the reload, and wait while models are fetched. Raises `UserError` with the problems."""
    done = admin.send("POST", "/v1/reload", Reloaded, None)
    if done.problems:
        raise UserError("\n".join(done.problems))
    for line in summary(done):
        screen.print(Text(line), soft_wrap=True)
    return 0
