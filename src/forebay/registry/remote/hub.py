"""`hf://ORGANISATION/NAME[@REVISION][/PATH]`: a model of the Hugging Face Hub, via its own cache."""

import re
from pathlib import Path

from httpx import HTTPError
from huggingface_hub import snapshot_download
from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

from forebay.registry.sources import Progress, RemoteSource, SourceError, near

FORM = re.compile(r"(?P<repo>[\w.-]+/[\w.-]+)(@(?P<revision>[^/@]+))?(/(?P<path>.+))?")


def fetch_hub(source: RemoteSource, progress: Progress) -> Path:
    """The snapshot of a repository, or a part of it; offline, from the cache. Raises `SourceError`."""
    match = FORM.fullmatch(source.rest)
    if match is None:
        raise SourceError(f"{source}: not of the form hf://ORGANISATION/NAME[@REVISION][/PATH]")
    inner = match["path"]
    wanted = [inner, f"{inner}/*"] if inner else None
    progress(f"fetching {match['repo']}", 0, None)
    try:
        found = Path(snapshot_download(match["repo"], revision=match["revision"], allow_patterns=wanted))
    except LocalEntryNotFoundError as error:
        raise SourceError(f"{source}: the Hub cannot be reached, and the cache does not have it") from error
    except (HfHubHTTPError, HFValidationError, HTTPError, OSError, ValueError) as error:
        reason = str(error).strip().splitlines() or [type(error).__name__]
        raise SourceError(f"{source}: {reason[0][:300]}") from error
    path = found / inner if inner else found
    if not path.exists():
        names = [each.relative_to(found).as_posix() for each in found.rglob("*") if each.is_file()]
        raise SourceError(f"{source}: there is no {inner} in it. {near(inner or '', names, 'In what was fetched')}")
    return path.absolute()
