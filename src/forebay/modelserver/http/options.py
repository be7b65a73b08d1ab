"""Options of the HTTP front, in a module of their own: the front is compiled, and frozen dataclasses cannot be."""

import re
from dataclasses import dataclass
from typing import Final

from forebay.wire.oip.infer_request import STRINGS_MAX

BODY_BYTES_MAX: Final = 64 * 1024 * 1024
"""Triton's default limit on JSON. It has none on binary tensors; ours applies to the whole body."""

JSON_OUTPUT_BYTES_MAX: Final = 64 * 1024 * 1024
"""Triton has no limit. This much becomes at most half a gigabyte of text, which takes seconds."""


@dataclass(frozen=True, slots=True)
class FrontOptions:
    """Options of a front."""

    name: str = "forebay"
    version: str = ""
    json_bytes_max: int = BODY_BYTES_MAX
    """Limit of a request's JSON, of each tensor decoded from it, and of a decompressed body."""
    json_output_bytes_max: int = JSON_OUTPUT_BYTES_MAX
    """Limit of the tensors of one response that are written as JSON."""
    strings_max: int = STRINGS_MAX
    """Elements of a BYTES tensor in a request's JSON."""
    forwarded_headers: re.Pattern[str] | None = None
    """Request headers whose lower-case name matches this pattern become parameters of that name."""
