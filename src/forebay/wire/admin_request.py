"""Requests of the admin API: parses bodies and queries into values, or raises a Refusal that names the problem."""

import re
from collections.abc import Mapping
from datetime import date
from typing import Any, Final, NamedTuple

from forebay.core.errors import Code, Refusal
from forebay.core.model import Task
from forebay.core.registry.approval import REASON_CHARS_MAX, Role
from forebay.core.registry.manifest import BadManifest, File, Manifest, make_manifest
from forebay.core.scaling.settings import REPLICAS_MAX
from forebay.core.tenancy.roles import HOLDER
from forebay.wire.openai_fields import (
    Reader,
    Shape,
    array_shape,
    boolean,
    decode,
    integer,
    invalid,
    nested,
    one_of,
    shape_of,
    shaped,
    text,
)
from forebay.wire.openai_fields import number as decimal

BODY_BYTES_MAX: Final = 4 * 1024 * 1024
"""Large enough for the largest cluster file as a JSON string."""
NAME_CHARS_MAX: Final = 128
SOURCE_CHARS_MAX: Final = 4096
PAIRS_MAX: Final = 64
VALUE_CHARS_MAX: Final = 100_000
"""Of one metadata value: large enough for a model card."""
BASE64_CHARS_MAX: Final = 1024
"""Of a public key or a signature."""
DOCUMENT_CHARS_MAX: Final = 1_000_000
FILE_BYTES_MAX: Final = 2**50
FOLDER_BYTES_MAX: Final = 255
SHA256: Final = re.compile("^[0-9a-f]{64}$")
KEY_S_MAX: Final = 100 * 365 * 86_400
"""Keeps the expiry of a key within the years that can be displayed."""
EVENTS_MAX: Final = 1000
"""Events, or rollouts, in one response."""
EVENTS: Final = 50
LINES: Final = 20
"""Lines of the audit log returned by default."""
EPOCH: Final = date(1970, 1, 1)
DATE: Final = re.compile("[0-9]{4}-[0-9]{2}-[0-9]{2}")
PERIOD_S_MAX: Final = 400 * 86_400
"""The retention of the availability history: a year, and a month to read it."""
CONTROL: Final = re.compile("[\x00-\x08\x0b-\x1f\x7f]")
"""Control characters except tab and line feed."""


class DeployRequest(NamedTuple):
    """A deployment request. `plan`: a kind of plan, or a plan as YAML or as an object; None: the model's own."""

    revision: str
    plan: str | dict[str, Any] | None = None
    why: str = ""
    unchecked: bool = False


class AddRequest(NamedTuple):
    """A registration. None: chosen to fit the source. `settings` are those of the engine."""

    source: str = ""
    task: str | None = None
    engine: str | None = None
    settings: Mapping[str, Any] = {}
    metadata: Mapping[str, str] = {}
    upload: "Upload | None" = None
    """Uploaded files, instead of a source."""


class Upload(NamedTuple):
    """Uploaded files, and their common name."""

    name: str
    manifest: Manifest


class PartRequest(NamedTuple):
    """Where a part of an uploaded file begins; `size_bytes` is that of the whole file."""

    sha256: str
    size_bytes: int
    offset: int


class SignRequest(NamedTuple):
    """A signature of an artifact: either a publisher's, with its public key, both base64; or a bundle."""

    public: str = ""
    signature: str = ""
    bundle: dict[str, Any] | None = None
    """The content of a `model.sig` of OpenSSF's Model Signing."""


class ApplyRequest(NamedTuple):
    """A cluster file as YAML; `dry_run`: only report what it would change."""

    document: str
    dry_run: bool = False


class ScaleRequest(NamedTuple):
    """The replica count of a model, or its bounds; None: as in the cluster file."""

    replicas: int | None = None
    min: int | None = None
    max: int | None = None
    why: str = ""


class DrainRequest(NamedTuple):
    """Take a node out of service; `force`: even if its replicas fit nowhere else."""

    why: str = ""
    force: bool = False


class UndrainRequest(NamedTuple):
    """Put a node, or only that device of it, back into service."""

    why: str = ""
    device: str = ""


class KeyRequest(NamedTuple):
    """A new key: of a tenant, or of the admin API with a role and the name of its holder. `expires_s` None: never."""

    tenant: str = ""
    name: str = ""
    role: str = ""
    expires_s: float | None = None
    why: str = ""


class RotateRequest(NamedTuple):
    """Replace a key by a new one; the old one expires after `overlap_s` seconds."""

    overlap_s: float = 0
    why: str = ""


class UsageRequest(NamedTuple):
    """A usage query for a tenant and a model (None: all), from a day on, in days since the epoch."""

    tenant: str | None = None
    model: str | None = None
    day_first: int = 0


class HistoryRequest(NamedTuple):
    """A query for the events of a subject and everything below it (None: all): the newest `last`, or the first after
    a number."""

    subject: str | None = None
    last: int = EVENTS
    after: int | None = None


def _plan(value: Any, path: str) -> str | dict[str, Any]:
    """A kind of plan, a plan as YAML, or an object."""
    if type(value) is dict:
        return value
    if type(value) is not str or not 0 < len(value) <= DOCUMENT_CHARS_MAX:
        invalid(path, "a kind of plan, a plan as YAML, or a plan as an object", value)
    return value


def _bundle(value: Any, path: str) -> dict[str, Any]:
    """A Sigstore bundle; its contents are validated by the bundle reader."""
    if type(value) is not dict:
        invalid(path, "an object, as it is in `model.sig`", value)
    return value


def _holder(value: Any, path: str) -> str:
    """The name of a key's holder."""
    if type(value) is not str or HOLDER.fullmatch(value) is None:
        invalid(path, "up to 64 letters, digits, and . _ @ + -", value)
    return value


def _pairs(value: Any, path: str) -> dict[str, str]:
    """Metadata of a model."""
    if type(value) is not dict or len(value) > PAIRS_MAX:
        invalid(path, f"an object of at most {PAIRS_MAX} strings", value)
    return {_KEY(key, f"{path} (a key)"): _VALUE(each, f"{path}.{key}") for key, each in value.items()}


def _settings(value: Any, path: str) -> dict[str, Any]:
    """Settings of an engine; the cluster file's rules validate their names and values."""
    if type(value) is not dict or len(value) > PAIRS_MAX:
        invalid(path, f"an object of at most {PAIRS_MAX} settings", value)
    for key, each in value.items():
        if type(each) not in (int, float, str, bool):
            invalid(f"{path}.{_KEY(key, f'{path} (a key)')}", "a number, a string or a boolean", each)
    return value


def _files(value: Any, path: str) -> tuple[File, ...]:
    """The files of an artifact."""
    if type(value) is not list or not value:
        invalid(path, "an array of files", value)
    return tuple(File(**_FILE(each, f"{path}[{number}]")) for number, each in enumerate(value))


def _sha256(value: Any, path: str) -> str:
    if type(value) is not str or not SHA256.fullmatch(value):
        invalid(path, "a SHA-256 in lower-case hex", value)
    return value


def _folder_name(value: Any, path: str) -> str:
    """A name that every file system accepts for a folder."""
    found: str = _NAME(value, path)
    if "/" in found or found in (".", "..") or len(found.encode(errors="replace")) > FOLDER_BYTES_MAX:
        invalid(path, "the name of a file or folder, without its path", value)
    return found


def _either(key: str, one: Reader, other: Reader) -> Reader:
    """One of two objects: the first if the value has that key."""

    def reader(value: Any, path: str) -> Any:
        return (one if type(value) is dict and value.get(key) is not None else other)(value, path)

    return shaped(reader, {"anyOf": [shape_of(one), shape_of(other)]})


def _written(chars_min: int, chars_max: int) -> Reader:
    """A text without control characters, which some stores and file systems reject."""
    plain = text(chars_min, chars_max)

    def reader(value: Any, path: str) -> str:
        found: str = plain(value, path)
        if CONTROL.search(found):
            invalid(path, "a text without control characters", value)
        return found

    return shaped(reader, {**shape_of(plain), "pattern": "^[^\\u0000-\\u0008\\u000b-\\u001f\\u007f]*$"})


_NAME: Final = _written(1, NAME_CHARS_MAX)
_KEY: Final = text(1, NAME_CHARS_MAX)
_VALUE: Final = text(0, VALUE_CHARS_MAX)
_WHY: Final = _written(0, REASON_CHARS_MAX)
_ONE: Final[Shape] = {"type": ["number", "string", "boolean"]}

DEPLOY: Final = nested(
    {
        "revision": _NAME,
        "plan": shaped(_plan, {"anyOf": [{"type": "string", "minLength": 1}, {"type": "object"}]}),
        "why": _WHY,
        "unchecked": boolean,
    },
    ("revision",),
)
COMMAND: Final = nested({"why": _WHY})
ALIAS: Final = nested({"revision": _NAME}, ("revision",))
_SHA256: Final = shaped(_sha256, {"type": "string", "pattern": SHA256.pattern})
_FILE: Final = nested(
    {"path": _written(1, SOURCE_CHARS_MAX), "size_bytes": integer(0, FILE_BYTES_MAX), "sha256": _SHA256},
    ("path", "size_bytes", "sha256"),
)
_MANIFEST: Final = {
    "files": shaped(_files, array_shape(shape_of(_FILE), 1)),
    "lone": boolean,
}
LACKING: Final = nested(_MANIFEST, ("files",))
_UPLOAD: Final = nested(
    {"name": shaped(_folder_name, {"type": "string", "pattern": "^[^/]+$"}), **_MANIFEST}, ("name", "files")
)
_DESCRIPTION: Final = {
    "task": one_of(*Task),
    "engine": _NAME,
    "settings": shaped(_settings, {"type": "object", "maxProperties": PAIRS_MAX, "additionalProperties": _ONE}),
    "metadata": shaped(
        _pairs,
        {
            "type": "object",
            "maxProperties": PAIRS_MAX,
            "propertyNames": {"minLength": 1, "maxLength": NAME_CHARS_MAX},
            "additionalProperties": {"type": "string", "maxLength": VALUE_CHARS_MAX},
        },
    ),
}
ADD: Final = _either(
    "upload",
    nested({"upload": _UPLOAD, **_DESCRIPTION}, ("upload",)),
    nested({"source": _written(1, SOURCE_CHARS_MAX), **_DESCRIPTION}, ("source",)),
)
_BASE64: Final = _written(1, BASE64_CHARS_MAX)
SIGN: Final = _either(
    "bundle",
    nested({"bundle": shaped(_bundle, {"type": "object"})}, ("bundle",)),
    nested({"public": _BASE64, "signature": _BASE64}, ("public", "signature")),
)
_REPLICAS: Final = integer(0, REPLICAS_MAX)
SCALE: Final = nested({"replicas": _REPLICAS, "min": _REPLICAS, "max": _REPLICAS, "why": _WHY})
DRAIN: Final = nested({"why": _WHY, "force": boolean})
UNDRAIN: Final = nested({"why": _WHY, "device": _NAME})
_KEY_S: Final = decimal(1, KEY_S_MAX)
CREATE_KEY: Final = _either(
    "name",
    nested(
        {
            "name": shaped(_holder, {"type": "string", "pattern": f"^{HOLDER.pattern}$"}),
            "role": one_of(*(role.name.lower() for role in Role)),
            "expires_s": _KEY_S,
            "why": _WHY,
        },
        ("name", "role"),
    ),
    nested({"tenant": _NAME, "expires_s": _KEY_S, "why": _WHY}, ("tenant",)),
)
ROTATE_KEY: Final = nested({"overlap_s": decimal(0, KEY_S_MAX), "why": _WHY})
VERIFY: Final = nested({"model": _NAME})
AUDIT_TAIL: Final = nested({"last": integer(1, EVENTS_MAX)})
AUDIT_VERIFY: Final = nested({"archived": boolean})
NOTHING: Final = nested({})
APPLY: Final = nested({"document": text(1, DOCUMENT_CHARS_MAX), "dry_run": boolean}, ("document",))


def deploy(body: bytes) -> DeployRequest:
    """Parse the body of `deploy`. Raises `Refusal`."""
    return DeployRequest(**_object(DEPLOY, body))


def why(body: bytes) -> str:
    """Parse the reason given for a command or an approval step; an empty body gives none. Raises `Refusal`."""
    return str(_object(COMMAND, body).get("why", ""))


def alias(body: bytes) -> str:
    """Parse the revision that an alias is set to. Raises `Refusal`."""
    return str(_object(ALIAS, body)["revision"])


def add(body: bytes) -> AddRequest:
    """Parse the body of a registration. Raises `Refusal`."""
    found = _object(ADD, body)
    if "upload" in found:
        sent = found["upload"]
        found["upload"] = Upload(sent["name"], _manifest(sent, "upload.files"))
    return AddRequest(**found)


def lacking(body: bytes) -> Manifest:
    """Parse the manifest of an upload, to find out which files are missing. Raises `Refusal`."""
    return _manifest(_object(LACKING, body), "files")


def _manifest(found: Mapping[str, Any], path: str) -> Manifest:
    try:
        return make_manifest(found["files"], found.get("lone", False))
    except BadManifest as error:
        raise Refusal(Code.INVALID_REQUEST, f"{path}: {error}.", path) from None


def part(sha256: str, query: Mapping[str, str]) -> PartRequest:
    """Parse the path and query of an upload of a file part. Raises `Refusal`."""
    if not SHA256.fullmatch(sha256):
        raise Refusal(Code.NOT_FOUND, "The path ends with the SHA-256 of a file, in lower-case hex.", "sha256")
    size_bytes, offset = (number(query.get(name, ""), name) for name in ("size_bytes", "offset"))
    if size_bytes > FILE_BYTES_MAX:
        raise Refusal(Code.INVALID_REQUEST, f"size_bytes: expected at most {FILE_BYTES_MAX}", "size_bytes")
    return PartRequest(sha256, size_bytes, offset)


def sign(body: bytes) -> SignRequest:
    """Parse a signature of either kind. Raises `Refusal`."""
    return SignRequest(**_object(SIGN, body))


def verify(body: bytes) -> str | None:
    """Parse the model to verify; None: all. Raises `Refusal`."""
    return _object(VERIFY, body).get("model")


def nothing(body: bytes) -> None:
    """Accept an empty body or an empty object. Raises `Refusal` for anything else."""
    _object(NOTHING, body)


def apply(body: bytes) -> ApplyRequest:
    """Parse the body of `apply`. Raises `Refusal`."""
    return ApplyRequest(**_object(APPLY, body))


def drain(body: bytes) -> DrainRequest:
    """Parse the body of a node's drain. Raises `Refusal`."""
    return DrainRequest(**_object(DRAIN, body))


def undrain(body: bytes) -> UndrainRequest:
    """Parse the body of an undrain of a node or device. Raises `Refusal`."""
    return UndrainRequest(**_object(UNDRAIN, body))


def create_key(body: bytes) -> KeyRequest:
    """Parse the body of a key's creation, of either kind. Raises `Refusal`."""
    return KeyRequest(**_object(CREATE_KEY, body))


def rotate_key(body: bytes) -> RotateRequest:
    """Parse the body of a key's rotation; an empty body means no overlap. Raises `Refusal`."""
    return RotateRequest(**_object(ROTATE_KEY, body))


def scale(body: bytes) -> ScaleRequest:
    """Parse the body of a model's scaling; an empty body sets nothing. Raises `Refusal`."""
    return ScaleRequest(**_object(SCALE, body))


def history(query: Mapping[str, str]) -> HistoryRequest:
    """Parse the query for the event history. Raises `Refusal`."""
    after = query.get("after")
    subject = name(query, "subject") or None
    return HistoryRequest(subject, last(query), None if after is None else number(after, "after"))


def usage(query: Mapping[str, str]) -> UsageRequest:
    """Parse the query for usage. Raises `Refusal`."""
    since = query.get("since")
    return UsageRequest(name(query, "tenant"), name(query, "model"), 0 if since is None else _day(since))


def _day(text: str) -> int:
    try:
        return (date.fromisoformat(text if DATE.fullmatch(text) else "") - EPOCH).days
    except ValueError:
        raise Refusal(Code.INVALID_REQUEST, "since: expected a date such as 2026-01-31", "since") from None


def audit_tail(body: bytes) -> int:
    """Parse the number of audit log lines to return. Raises `Refusal`."""
    return int(_object(AUDIT_TAIL, body).get("last", LINES))


def audit_verify(body: bytes) -> bool:
    """Parse whether the oldest files of the audit log may be missing because they were archived. Raises `Refusal`."""
    return bool(_object(AUDIT_VERIFY, body).get("archived", False))


def name(query: Mapping[str, str], key: str) -> str | None:
    """A name from a query; None if it is absent. Raises `Refusal`."""
    found = query.get(key)
    if found is not None and (len(found) > NAME_CHARS_MAX * 2 or not found.isprintable()):
        raise Refusal(Code.INVALID_REQUEST, f"{key}: expected up to {NAME_CHARS_MAX * 2} printable characters", key)
    return found


def last(query: Mapping[str, str]) -> int:
    """How many of the newest entries to return. Raises `Refusal`."""
    found = number(query.get("last", str(EVENTS)), "last")
    if not 1 <= found <= EVENTS_MAX:
        raise Refusal(Code.INVALID_REQUEST, f"last: expected a number from 1 to {EVENTS_MAX}", "last")
    return found


def number(value: str, name: str) -> int:
    """A whole number from a query. Raises `Refusal`."""
    if not value.isascii() or not value.isdigit() or len(value) > 18:
        raise Refusal(Code.INVALID_REQUEST, f"{name}: expected a whole number of up to 18 digits", name)
    return int(value)


def flag(query: Mapping[str, str], name: str) -> bool | None:
    """A boolean from a query; None if it is absent. Raises `Refusal`."""
    value = query.get(name)
    if value not in (None, "true", "false"):
        raise Refusal(Code.INVALID_REQUEST, f"{name}: expected `true` or `false`", name)
    return None if value is None else value == "true"


def _object(reader: Reader, body: bytes) -> dict[str, Any]:
    found: dict[str, Any] = reader(decode(body) if body else {}, "")
    return found
