"""What clients of the admin API send: bodies and queries as values, or a Refusal that names what is wrong."""

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
"""Room for the largest cluster file as a JSON string."""
NAME_CHARS_MAX: Final = 128
SOURCE_CHARS_MAX: Final = 4096
PAIRS_MAX: Final = 64
VALUE_CHARS_MAX: Final = 100_000
"""Of metadata: a model card fits."""
BASE64_CHARS_MAX: Final = 1024
"""Of a public key, or of a signature."""
DOCUMENT_CHARS_MAX: Final = 1_000_000
FILE_BYTES_MAX: Final = 2**50
FOLDER_BYTES_MAX: Final = 255
SHA256: Final = re.compile("^[0-9a-f]{64}$")
KEY_S_MAX: Final = 100 * 365 * 86_400
"""A key that is good for longer ends in no year that can be shown."""
EVENTS_MAX: Final = 1000
"""Events, or rollouts, of one answer."""
EVENTS: Final = 50
LINES: Final = 20
"""Lines of the audit log, if nobody says how many."""
EPOCH: Final = date(1970, 1, 1)
DATE: Final = re.compile("[0-9]{4}-[0-9]{2}-[0-9]{2}")
PERIOD_S_MAX: Final = 400 * 86_400
"""So long is kept what became of models: a year, and a month to look at it."""
CONTROL: Final = re.compile("[\x00-\x08\x0b-\x1f\x7f]")
"""All but tabulators and ends of lines."""


class DeployAsked(NamedTuple):
    """What is to be rolled out. `plan`: a kind, a plan as YAML, or one as an object; None: the model's own."""

    revision: str
    plan: str | dict[str, Any] | None = None
    why: str = ""
    unchecked: bool = False


class AddAsked(NamedTuple):
    """What is to be registered. None: what fits the source. `settings` are those of the engine."""

    source: str = ""
    task: str | None = None
    engine: str | None = None
    settings: Mapping[str, Any] = {}
    metadata: Mapping[str, str] = {}
    upload: "Upload | None" = None
    """In place of a source."""


class Upload(NamedTuple):
    """Files that were sent, and what they are called together."""

    name: str
    manifest: Manifest


class PartAsked(NamedTuple):
    """Where a part of a content of so many bytes begins."""

    sha256: str
    size_bytes: int
    offset: int


class SignAsked(NamedTuple):
    """A signature of an artifact: a publisher's, with the key it is checked with, both base64; or a bundle."""

    public: str = ""
    signature: str = ""
    bundle: dict[str, Any] | None = None
    """What is in a `model.sig` of OpenSSF's Model Signing."""


class ApplyAsked(NamedTuple):
    """A cluster file as YAML, and whether it is only to be said what it would change."""

    document: str
    dry_run: bool = False


class ScaleAsked(NamedTuple):
    """How many replicas a model is to have, or within which bounds; None: as the cluster file says."""

    replicas: int | None = None
    min: int | None = None
    max: int | None = None
    why: str = ""


class DrainAsked(NamedTuple):
    """Taking a node out of service; `force`: also if what runs there fits nowhere else."""

    why: str = ""
    force: bool = False


class UndrainAsked(NamedTuple):
    """Letting a node serve again, or only that device of it."""

    why: str = ""
    device: str = ""


class KeyAsked(NamedTuple):
    """A key: of a tenant, or of the admin API with a role and the name of who has it. `expires_s` None: for ever."""

    tenant: str = ""
    name: str = ""
    role: str = ""
    expires_s: float | None = None
    why: str = ""


class RotateAsked(NamedTuple):
    """A key in the place of another, which ends after so many seconds."""

    overlap_s: float = 0
    why: str = ""


class UsageAsked(NamedTuple):
    """Usage of one tenant and one model, None: of all; from a day on, in days since the epoch."""

    tenant: str | None = None
    model: str | None = None
    day_first: int = 0


class HistoryAsked(NamedTuple):
    """Events of a subject and what lies below it; None: of all. The newest `last`, or the first after a number."""

    subject: str | None = None
    last: int = EVENTS
    after: int | None = None


def _plan(value: Any, path: str) -> str | dict[str, Any]:
    """A kind, a text, or an object."""
    if type(value) is dict:
        return value
    if type(value) is not str or not 0 < len(value) <= DOCUMENT_CHARS_MAX:
        invalid(path, "a kind of plan, a plan as YAML, or a plan as an object", value)
    return value


def _bundle(value: Any, path: str) -> dict[str, Any]:
    """A Sigstore bundle: what it may be, its own reader says."""
    if type(value) is not dict:
        invalid(path, "an object, as it is in `model.sig`", value)
    return value


def _holder(value: Any, path: str) -> str:
    """Who has a key."""
    if type(value) is not str or HOLDER.fullmatch(value) is None:
        invalid(path, "up to 64 letters, digits, and . _ @ + -", value)
    return value


def _pairs(value: Any, path: str) -> dict[str, str]:
    """Metadata."""
    if type(value) is not dict or len(value) > PAIRS_MAX:
        invalid(path, f"an object of at most {PAIRS_MAX} strings", value)
    return {_KEY(key, f"{path} (a key)"): _VALUE(each, f"{path}.{key}") for key, each in value.items()}


def _settings(value: Any, path: str) -> dict[str, Any]:
    """Settings of an engine: the cluster file's own rules say what they may be."""
    if type(value) is not dict or len(value) > PAIRS_MAX:
        invalid(path, f"an object of at most {PAIRS_MAX} settings", value)
    for key, each in value.items():
        if type(each) not in (int, float, str, bool):
            invalid(f"{path}.{_KEY(key, f'{path} (a key)')}", "a number, a string or a boolean", each)
    return value


def _files(value: Any, path: str) -> tuple[File, ...]:
    """What an artifact consists of."""
    if type(value) is not list or not value:
        invalid(path, "an array of files", value)
    return tuple(File(**_FILE(each, f"{path}[{number}]")) for number, each in enumerate(value))


def _sha256(value: Any, path: str) -> str:
    if type(value) is not str or not SHA256.fullmatch(value):
        invalid(path, "a SHA-256 in lower-case hex", value)
    return value


def _folder_name(value: Any, path: str) -> str:
    """What a folder may be called, anywhere."""
    found: str = _NAME(value, path)
    if "/" in found or found in (".", "..") or len(found.encode(errors="replace")) > FOLDER_BYTES_MAX:
        invalid(path, "the name of a file or folder, without its path", value)
    return found


def _either(key: str, one: Reader, other: Reader) -> Reader:
    """One of two objects: the first if it has that key."""

    def reader(value: Any, path: str) -> Any:
        return (one if type(value) is dict and value.get(key) is not None else other)(value, path)

    return shaped(reader, {"anyOf": [shape_of(one), shape_of(other)]})


def _written(chars_min: int, chars_max: int) -> Reader:
    """A text without control characters, of which stores and file systems do not take all."""
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


def deploy(body: bytes) -> DeployAsked:
    """Of `deploy`. Raises `Refusal`."""
    return DeployAsked(**_object(DEPLOY, body))


def why(body: bytes) -> str:
    """Of a command or a step of approval; an empty body gives no reason. Raises `Refusal`."""
    return str(_object(COMMAND, body).get("why", ""))


def alias(body: bytes) -> str:
    """The revision that an alias is to lead to. Raises `Refusal`."""
    return str(_object(ALIAS, body)["revision"])


def add(body: bytes) -> AddAsked:
    """Of a registration. Raises `Refusal`."""
    found = _object(ADD, body)
    if "upload" in found:
        sent = found["upload"]
        found["upload"] = Upload(sent["name"], _manifest(sent, "upload.files"))
    return AddAsked(**found)


def lacking(body: bytes) -> Manifest:
    """Of what is to be sent. Raises `Refusal`."""
    return _manifest(_object(LACKING, body), "files")


def _manifest(found: Mapping[str, Any], path: str) -> Manifest:
    try:
        return make_manifest(found["files"], found.get("lone", False))
    except BadManifest as error:
        raise Refusal(Code.INVALID_REQUEST, f"{path}: {error}.", path) from None


def part(sha256: str, query: Mapping[str, str]) -> PartAsked:
    """Of a part of a content. Raises `Refusal`."""
    if not SHA256.fullmatch(sha256):
        raise Refusal(Code.NOT_FOUND, "The path ends with the SHA-256 of a file, in lower-case hex.", "sha256")
    size_bytes, offset = (number(query.get(name, ""), name) for name in ("size_bytes", "offset"))
    if size_bytes > FILE_BYTES_MAX:
        raise Refusal(Code.INVALID_REQUEST, f"size_bytes: expected at most {FILE_BYTES_MAX}", "size_bytes")
    return PartAsked(sha256, size_bytes, offset)


def sign(body: bytes) -> SignAsked:
    """Of a signature: one of the two kinds. Raises `Refusal`."""
    return SignAsked(**_object(SIGN, body))


def verify(body: bytes) -> str | None:
    """The only model to verify; None: all. Raises `Refusal`."""
    return _object(VERIFY, body).get("model")


def nothing(body: bytes) -> None:
    """No body, or an empty object. Raises `Refusal`."""
    _object(NOTHING, body)


def apply(body: bytes) -> ApplyAsked:
    """Of `apply`. Raises `Refusal`."""
    return ApplyAsked(**_object(APPLY, body))


def drain(body: bytes) -> DrainAsked:
    """Of a node. Raises `Refusal`."""
    return DrainAsked(**_object(DRAIN, body))


def undrain(body: bytes) -> UndrainAsked:
    """Of a node or a device. Raises `Refusal`."""
    return UndrainAsked(**_object(UNDRAIN, body))


def create_key(body: bytes) -> KeyAsked:
    """Of one of the two kinds. Raises `Refusal`."""
    return KeyAsked(**_object(CREATE_KEY, body))


def rotate_key(body: bytes) -> RotateAsked:
    """Of a key; an empty body leaves no overlap. Raises `Refusal`."""
    return RotateAsked(**_object(ROTATE_KEY, body))


def scale(body: bytes) -> ScaleAsked:
    """Of a model's scaling; an empty body sets nothing. Raises `Refusal`."""
    return ScaleAsked(**_object(SCALE, body))


def history(query: Mapping[str, str]) -> HistoryAsked:
    """Of the history. Raises `Refusal`."""
    after = query.get("after")
    subject = name(query, "subject") or None
    return HistoryAsked(subject, last(query), None if after is None else number(after, "after"))


def usage(query: Mapping[str, str]) -> UsageAsked:
    """Of what was used. Raises `Refusal`."""
    since = query.get("since")
    return UsageAsked(name(query, "tenant"), name(query, "model"), 0 if since is None else _day(since))


def _day(text: str) -> int:
    try:
        return (date.fromisoformat(text if DATE.fullmatch(text) else "") - EPOCH).days
    except ValueError:
        raise Refusal(Code.INVALID_REQUEST, "since: expected a date such as 2026-01-31", "since") from None


def audit_tail(body: bytes) -> int:
    """How many lines of the audit log are wanted. Raises `Refusal`."""
    return int(_object(AUDIT_TAIL, body).get("last", LINES))


def audit_verify(body: bytes) -> bool:
    """Whether the oldest files of the audit log were moved elsewhere on purpose. Raises `Refusal`."""
    return bool(_object(AUDIT_VERIFY, body).get("archived", False))


def name(query: Mapping[str, str], key: str) -> str | None:
    """A name in a query; None: it is not there. Raises `Refusal`."""
    found = query.get(key)
    if found is not None and (len(found) > NAME_CHARS_MAX * 2 or not found.isprintable()):
        raise Refusal(Code.INVALID_REQUEST, f"{key}: expected up to {NAME_CHARS_MAX * 2} printable characters", key)
    return found


def last(query: Mapping[str, str]) -> int:
    """How many of the newest are wanted. Raises `Refusal`."""
    found = number(query.get("last", str(EVENTS)), "last")
    if not 1 <= found <= EVENTS_MAX:
        raise Refusal(Code.INVALID_REQUEST, f"last: expected a number from 1 to {EVENTS_MAX}", "last")
    return found


def number(value: str, name: str) -> int:
    """A number as a query has it. Raises `Refusal`."""
    if not value.isascii() or not value.isdigit() or len(value) > 18:
        raise Refusal(Code.INVALID_REQUEST, f"{name}: expected a whole number of up to 18 digits", name)
    return int(value)


def flag(query: Mapping[str, str], name: str) -> bool | None:
    """True or false; None: it is not there. Raises `Refusal`."""
    value = query.get(name)
    if value not in (None, "true", "false"):
        raise Refusal(Code.INVALID_REQUEST, f"{name}: expected `true` or `false`", name)
    return None if value is None else value == "true"


def _object(reader: Reader, body: bytes) -> dict[str, Any]:
    found: dict[str, Any] = reader(decode(body) if body else {}, "")
    return found
