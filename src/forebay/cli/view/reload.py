"""`forebay reload`: asks the running cluster to read its cluster file again, and says what came of it."""

import httpx
import msgspec
from rich.console import Console
from rich.text import Text

from forebay.cli.reload import summary
from forebay.cli.settings import NOT_REACHED, UserError
from forebay.control.changes import Reloaded

CONNECT_TIMEOUT_S = 5.0
DONE, PROBLEMS = 200, 422


def reload(url: str, screen: Console) -> int:
    """Ask, and wait while models are fetched. Raises `UserError` with the problems, or if nothing answers."""
    try:
        answer = httpx.post(
            f"{url}/v1/reload", timeout=httpx.Timeout(None, connect=CONNECT_TIMEOUT_S), trust_env=False
        )
        if answer.status_code not in (DONE, PROBLEMS):
            answer.raise_for_status()
        done = msgspec.json.decode(answer.content, type=Reloaded)
    except httpx.ConnectError:
        raise UserError(
            f"No cluster runs at {url}. If it has another admin port, say --url or FOREBAY_ADMIN_URL.", NOT_REACHED
        ) from None
    except (httpx.HTTPError, httpx.InvalidURL, msgspec.MsgspecError) as error:
        raise UserError(f"{url} does not answer like the admin API of this Forebay ({error}).", NOT_REACHED) from None
    if done.problems:
        raise UserError("\n".join(done.problems))
    for line in summary(done):
        screen.print(Text(line), soft_wrap=True)
    return 0
