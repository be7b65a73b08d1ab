"""Client side of the server that `chat`, `bench` and `conformance` use: connect, choose a model, format errors."""

import ssl
from pathlib import Path

import httpx

from forebay.cli.settings import NOT_REACHED, WRONG_USAGE, UserError

CONNECT_TIMEOUT_S = 5.0
ANSWER_TIMEOUT_S = 600.0


def refusal(response: httpx.Response) -> str:
    """The text of an HTTP error."""
    try:
        error = response.json()["error"]
        text = f"{error['message']} [{error['code']}]" if isinstance(error, dict) else str(error)
    except (ValueError, KeyError, TypeError):
        text = response.text[:200].strip() or response.reason_phrase
    after = response.headers.get("retry-after")
    return f"{text} (HTTP {response.status_code}{f'; retry after {after} s' if after else ''})"


def trusted(url: str, ca: Path | None) -> ssl.SSLContext | None:
    """The TLS context for an https `url`: trusts the CAs in `ca`, or those of the system.

    None: `url` is not https. Raises `UserError`.
    """
    if not url.lower().startswith("https:"):
        return None
    if ca is None:
        return httpx.create_ssl_context(trust_env=False)
    try:
        return ssl.create_default_context(cafile=ca)
    except OSError as error:
        raise UserError(f"--ca: {ca} is not a PEM file with certificates ({error.strerror or error}).") from None


def checks(url: str, tls: ssl.SSLContext | None = None) -> ssl.SSLContext:
    """The `verify` argument for httpx; `tls`: the result of `trusted`.

    By default httpx loads all CAs even for http, which takes longer than most requests.
    """
    return tls or trusted(url, None) or ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)


def base_url(text: str, origin: str) -> str:
    """A base URL with a scheme, by default http, and without a trailing slash. Raises `UserError`, with the origin of
    the text."""
    try:
        url = httpx.URL(text if "://" in text else f"http://{text}")
    except httpx.InvalidURL as error:
        raise UserError(f"{origin}: found {text!r} ({error}); allowed: http[s]://HOST:PORT", WRONG_USAGE) from None
    if url.scheme not in ("http", "https") or not url.host:
        raise UserError(f"{origin}: found {text!r}; allowed: http[s]://HOST:PORT", WRONG_USAGE)
    try:
        url.raw_host.decode("ascii").encode("idna")  # as every look-up of a host does, which would raise it
    except UnicodeError:
        raise UserError(f"{origin}: found {text!r}; {url.host} is not the name of a host", WRONG_USAGE) from None
    return str(url).rstrip("/")


def bearer(key: str | None, origin: str) -> dict[str, str]:
    """The header that sends an API key, if there is one. Raises `UserError`, with the origin of the key."""
    if key and not (key.isascii() and key.isprintable()):
        raise UserError(
            f"{origin}: found a character that no HTTP header can hold; allowed: printable ASCII", WRONG_USAGE
        )
    return {"authorization": f"Bearer {key}"} if key else {}


def connect(url: str, api_key: str | None, tls: ssl.SSLContext | None = None) -> httpx.Client:
    """A client for an OpenAI-compatible server at `url`, with or without `/v1`. `tls`: the result of `trusted`.

    Raises `UserError`.
    """
    return httpx.Client(
        verify=checks(url, tls),
        base_url=base_url(url, "--url or FOREBAY_URL").removesuffix("/v1"),
        headers=bearer(api_key, "--api-key or FOREBAY_API_KEY"),
        timeout=httpx.Timeout(ANSWER_TIMEOUT_S, connect=CONNECT_TIMEOUT_S),
        trust_env=False,
    )


def choose_model(client: httpx.Client, wanted: str | None, preferred: str) -> str:
    """The wanted model, else the only one, else the one called `preferred`. Raises `UserError`."""
    response = None
    try:
        response = client.get("/v1/models")
        if not response.is_success:
            raise ValueError(refusal(response))
        names = sorted(str(entry["id"]) for entry in response.json()["data"])
    except (httpx.ConnectError, httpx.ConnectTimeout) as error:
        if "CERTIFICATE_VERIFY_FAILED" in str(error):
            raise UserError(
                f"The certificate of {client.base_url} is not trusted ({str(error).partition('failed: ')[2]}). "
                "If it was issued by a private CA, name that with --ca or FOREBAY_CA.",
                NOT_REACHED,
            ) from None
        raise UserError(
            f"Nothing answers at {client.base_url}. Start a cluster with `forebay up`, "
            "or name another server with --url or FOREBAY_URL.",
            NOT_REACHED,
        ) from None
    except (httpx.HTTPError, ValueError, KeyError, TypeError) as error:
        if wanted:
            return wanted
        if response is not None and response.status_code == httpx.codes.UNAUTHORIZED:
            raise UserError(f"{error}\nGive a valid key with --api-key or FOREBAY_API_KEY.") from None
        raise UserError(
            f"{client.base_url}/v1/models returned no list of models ({error}). Name one with --model.", NOT_REACHED
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
