"""The server that `chat` and `bench` talk to: reach it, see what it serves, put its refusals in words."""

import httpx

from forebay.cli.settings import NOT_REACHED, UserError

CONNECT_TIMEOUT_S = 5.0
ANSWER_TIMEOUT_S = 600.0


def refusal(response: httpx.Response) -> str:
    """An HTTP error in words."""
    try:
        error = response.json()["error"]
        text = f"{error['message']} [{error['code']}]" if isinstance(error, dict) else str(error)
    except (ValueError, KeyError, TypeError):
        text = response.text[:200].strip() or response.reason_phrase
    after = response.headers.get("retry-after")
    return f"{text} (HTTP {response.status_code}{f'; try again in {after} s' if after else ''})"


def connect(url: str, api_key: str | None) -> httpx.Client:
    """A client for an OpenAI-compatible server at `url`, with or without `/v1`."""
    return httpx.Client(
        base_url=url.removesuffix("/v1"),
        headers={"authorization": f"Bearer {api_key}"} if api_key else {},
        timeout=httpx.Timeout(ANSWER_TIMEOUT_S, connect=CONNECT_TIMEOUT_S),
        trust_env=False,
    )


def choose_model(client: httpx.Client, wanted: str | None, preferred: str) -> str:
    """The wanted model, else the only one, else the one called `preferred`. Raises `UserError`."""
    try:
        response = client.get("/v1/models")
        response.raise_for_status()
        names = sorted(str(entry["id"]) for entry in response.json()["data"])
    except httpx.ConnectError:
        raise UserError(
            f"Nothing answers at {client.base_url}. Start a cluster with `forebay up`, "
            "or name another server with --url or FOREBAY_URL.",
            NOT_REACHED,
        ) from None
    except (httpx.HTTPError, ValueError, KeyError, TypeError) as error:
        if wanted:
            return wanted
        raise UserError(
            f"{client.base_url}/v1/models gives no list of models ({error}). Name one with --model.", NOT_REACHED
        ) from None
    if wanted and wanted not in names:
        raise UserError(f"There is no model {wanted!r} at {client.base_url}; there is: {', '.join(names) or 'none'}.")
    if wanted:
        return wanted
    if len(names) == 1:
        return names[0]
    if preferred in names:
        return preferred
    raise UserError(f"Choose a model with --model; there is: {', '.join(names) or 'none'}.")
