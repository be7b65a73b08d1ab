"""How the HTTP front is set up. Apart from the front because that is compiled, and a frozen dataclass cannot be."""

import re
from dataclasses import dataclass
from typing import Final

from forebay.wire.oip.infer_request import STRINGS_MAX

BODY_BYTES_MAX: Final = 64 * 1024 * 1024
"""Triton's default limit on JSON. It sets none on binary tensors; ours is for the whole body."""

JSON_OUTPUT_BYTES_MAX: Final = 64 * 1024 * 1024
"""Triton sets no limit. So much becomes half a gigabyte of text or less, in seconds."""


@dataclass(frozen=True, slots=True)
class FrontOptions:
    """How a front is set up."""

    name: str = "forebay"
    version: str = ""
    json_bytes_max: int = BODY_BYTES_MAX
    """Of a request's JSON, of each tensor in it once that is bytes, and of a body once it is decompressed."""
    json_output_bytes_max: int = JSON_OUTPUT_BYTES_MAX
    """Of the tensors of one answer that become JSON."""
    strings_max: int = STRINGS_MAX
    """Elements of a BYTES tensor in a request's JSON."""
    forwarded_headers: re.Pattern[str] | None = None
    """Request headers with a name in which this is found become parameters. Names are lower-case."""
