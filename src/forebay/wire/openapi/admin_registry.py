"""The registry in the admin API: operations on revisions, on what is sent of them, and on everything that is kept."""

from typing import Final

from forebay.wire import admin_request as bodies
from forebay.wire.openai_fields import Shape
from forebay.wire.openapi.admin_parts import BODY, CHANGE, MISSING, Answers, Said, operation
from forebay.wire.openapi.document import JSON, OCTETS, Operation, Parameter

_BYTES: Final[Shape] = {"type": "integer", "minimum": 0, "maximum": bodies.FILE_BYTES_MAX}
_SIZE: Final = Parameter("size_bytes", "query", "Size of the whole content, bytes.", _BYTES, required=True)
_OFFSET: Final = Parameter("offset", "query", "Offset of this part, bytes.", _BYTES, required=True)


def revisions(given: Answers) -> tuple[Operation, ...]:
    """What is registered, and what people do with it."""
    one: Said = {200: {JSON: given.revision}}
    several: Said = {200: {JSON: given.revisions}}
    path, why = "/v1/registry/{model}/{revision}", (bodies.COMMAND, "Why")
    steps = {
        "approve": "Approve a revision.",
        "reject": "Reject a revision, even an approved one.",
        "resubmit": "Submit a rejected revision for approval again.",
    }
    return (
        operation("/v1/registry", "get", "revisions", "All registered revisions.", several, codes=MISSING),
        operation(
            "/v1/registry/{model}",
            "get",
            "revisionsOfModel",
            "Registered revisions of a model.",
            several,
            codes=MISSING,
        ),
        operation(
            "/v1/registry/{model}",
            "post",
            "addRevision",
            "Register a model fetched from a `source` or uploaded before (`upload`); answers when registration is "
            "complete.",
            one,
            body=(bodies.ADD, "Add"),
            codes=CHANGE,
        ),
        operation(path, "get", "revision", "Everything about a revision.", one, codes=MISSING),
        *(
            operation(f"{path}/{name}", "post", name, text, one, body=why, codes=CHANGE)
            for name, text in steps.items()
        ),
        operation(
            f"{path}/signatures",
            "post",
            "sign",
            "Add a publisher's signature to the artifact of a revision: `public` and `signature`, or a `bundle` of "
            "OpenSSF's Model Signing. Private keys stay where they are.",
            one,
            body=(bodies.SIGN, "Signature"),
            codes=CHANGE,
        ),
        operation(
            "/v1/registry/{model}/aliases/{alias}",
            "put",
            "setAlias",
            "Point an alias at a revision, replacing any earlier target.",
            one,
            body=(bodies.ALIAS, "Alias"),
            codes=CHANGE,
        ),
    )


def uploads(given: Answers) -> tuple[Operation, ...]:
    """What is sent of files that the cluster does not see itself."""
    return (
        operation(
            "/v1/uploads",
            "post",
            "lacking",
            "Which contents of an artifact are missing, and how much of each has arrived.",
            {200: {JSON: given.lacking}},
            body=(bodies.LACKING, "Manifest"),
            codes=CHANGE,
        ),
        operation(
            "/v1/uploads/{sha256}",
            "put",
            "upload",
            "Upload a part of a content. It is kept if it continues what has arrived; the answer says where to go on."
            " Uploads that are idle for two days are removed.",
            {200: {JSON: given.part}},
            query=(_SIZE, _OFFSET),
            bodies={OCTETS: None},
            codes=CHANGE,
        ),
    )


def upkeep(given: Answers) -> tuple[Operation, ...]:
    """What is done with everything that is kept."""
    return (
        operation(
            "/v1/verify",
            "post",
            "verify",
            "Verify every byte of files, records and history.",
            {200: {JSON: given.verified}},
            body=(bodies.VERIFY, "Verify"),
            codes=(*BODY, *MISSING),
        ),
        operation(
            "/v1/gc",
            "post",
            "collect",
            "Remove files that no revision refers to any more.",
            {200: {JSON: given.collected}},
            body=(bodies.NOTHING, "Nothing"),
            codes=(*BODY, *MISSING),
        ),
    )
