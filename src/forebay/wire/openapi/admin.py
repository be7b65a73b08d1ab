"""The admin API of control as an OpenAPI document."""

from functools import cache
from typing import Final

from forebay.core.errors import Code
from forebay.wire import admin_request as bodies
from forebay.wire.openai_fields import Shape
from forebay.wire.openapi import admin_registry
from forebay.wire.openapi.admin_parts import BODY, CHANGE, MISSING, STORE, Answers, Said, operation
from forebay.wire.openapi.document import JSON, PATH, TEXT, Operation, Parameter, make_document

SECURITY: Final[dict[str, Shape]] = {
    "key": {
        "type": "http",
        "scheme": "bearer",
        "description": "A key made by `forebay keys create --admin ROLE`, where `admin.auth` is `keys`.",
    }
}
_PRINTABLE: Final[Shape] = {"type": "string", "pattern": "^[ -~]*$", "maxLength": 2 * bodies.NAME_CHARS_MAX}
_NUMBER: Final[Shape] = {"type": "string", "pattern": "^[0-9]{1,18}$"}
_LAST: Final = Parameter(
    "last",
    "query",
    "Number of most recent ones to return.",
    {"type": "integer", "minimum": 1, "maximum": bodies.EVENTS_MAX},
)
_AFTER: Final = Parameter("after", "query", "Only events with a higher number.", _NUMBER)
_SUBJECT: Final = Parameter(
    "subject",
    "query",
    "Only events about this subject, such as `model/chat`, or anything below it.",
    _PRINTABLE,
)
_OF_MODEL: Final = Parameter("model", "query", "Only of this model.", _PRINTABLE)
_PERIOD: Final = Parameter(
    "period_s",
    "query",
    "Length of the period up to now, seconds; default: 30 days.",
    {"type": "integer", "minimum": 1, "maximum": bodies.PERIOD_S_MAX},
)
_REQUEST_ID: Final = Parameter(
    "request_id", "query", "The `x-request-id` of its answer.", {**_PRINTABLE, "minLength": 1}, required=True
)
_OF_TENANT: Final = Parameter("tenant", "query", "Only of this tenant.", _PRINTABLE)
_SINCE: Final = Parameter(
    "since", "query", "First day (UTC) to include, such as `2026-01-31`.", {"type": "string", "format": "date"}
)
_ENDED: Final = Parameter(
    "ended",
    "query",
    "Only finished rollouts, or only those in progress. Default: those in progress, and the last one of each model.",
    {"type": "boolean"},
)
_KEYS: Final = (*MISSING, Code.INTERNAL)


def operations(given: Answers) -> tuple[Operation, ...]:
    """All there are."""
    registry = (admin_registry.revisions, admin_registry.uploads, admin_registry.upkeep)
    groups = (_looks, _cluster, _rollouts, _scaling, _nodes, *registry, _keys, _records)
    return tuple(each for group in groups for each in group(given))


@cache
def document(version: str, given: Answers) -> bytes:
    """The document as JSON."""
    text = (
        "Inspect and change a cluster. With `admin.auth: keys` every request except those "
        "for health and this document needs a key; each operation says which role it needs."
    )
    return make_document("Forebay admin", text, version, operations(given), SECURITY)


def _looks(given: Answers) -> tuple[Operation, ...]:
    text: Said = {200: {TEXT: None}}
    return (
        operation("/livez", "get", "livez", "Liveness of control.", text),
        operation(
            "/readyz",
            "get",
            "readyz",
            "Readiness: whether the cluster serves every model.",
            {**text, 503: {TEXT: None}},
        ),
        operation("/metrics", "get", "metrics", "Control's metrics, in Prometheus' text format.", text),
        operation(
            "/v1/status", "get", "status", "The cluster: models, replicas, gateways.", {200: {JSON: given.status}}
        ),
        operation(
            "/v1/events",
            "get",
            "events",
            "What control has seen and done since it started, oldest first.",
            {200: {JSON: given.events}},
            query=(_AFTER,),
            codes=(Code.INVALID_REQUEST,),
        ),
        operation(
            "/v1/history",
            "get",
            "history",
            "Who changed what, when and why, oldest first: the most recent events, or the first ones after a number.",
            {200: {JSON: given.history}},
            query=(_SUBJECT, _LAST, _AFTER),
            codes=(Code.INVALID_REQUEST, *STORE),
        ),
        operation(
            "/v1/sla",
            "get",
            "sla",
            "The availability that the models can promise as configured, and what was delivered in a period.",
            {200: {JSON: given.sla}},
            query=(_OF_MODEL, _PERIOD),
            codes=(Code.INVALID_REQUEST, Code.NOT_FOUND, Code.CONFLICT, Code.OVERLOADED, Code.DRAINING),
        ),
        operation(PATH, "get", "openapi", "This document.", {200: {JSON: dict}}),
    )


def _cluster(given: Answers) -> tuple[Operation, ...]:
    said: Said = {200: {JSON: given.reloaded}, 422: {JSON: given.reloaded}}
    return (
        operation(
            "/v1/reload",
            "post",
            "reload",
            "Reload the cluster file; if it has problems, nothing is changed.",
            said,
            codes=(Code.INVALID_REQUEST,),
        ),
        operation(
            "/v1/apply",
            "post",
            "apply",
            "Apply the cluster file in the request, or, with `dry_run`, report what it would change.",
            said,
            body=(bodies.APPLY, "Apply"),
            codes=BODY,
        ),
    )


def _rollouts(given: Answers) -> tuple[Operation, ...]:
    one: Said = {200: {JSON: given.rollout}}
    commands = {
        "pause": "Hold a rollout at its current traffic share. A harmful revision is still rolled back.",
        "resume": "Resume a paused rollout.",
        "promote": "Advance a rollout to its next step without waiting for a verdict.",
        "abort": "Abort a rollout: all traffic returns to the old revision at once.",
    }
    return (
        operation(
            "/v1/models/{model}/deploy",
            "post",
            "deploy",
            "Roll out a revision of a model.",
            one,
            body=(bodies.DEPLOY, "Deploy"),
            codes=CHANGE,
        ),
        operation(
            "/v1/rollouts",
            "get",
            "rollouts",
            "Rollouts, newest last.",
            {200: {JSON: given.rollouts}},
            query=(_OF_MODEL, _ENDED, _LAST),
            codes=(Code.INVALID_REQUEST, Code.NOT_FOUND, *STORE),
        ),
        operation("/v1/rollouts/{id}", "get", "rollout", "A rollout.", one, codes=(Code.NOT_FOUND, *STORE)),
        *(
            operation(
                f"/v1/rollouts/{{id}}/{name}", "post", name, text, one, body=(bodies.COMMAND, "Why"), codes=CHANGE
            )
            for name, text in commands.items()
        ),
    )


def _scaling(given: Answers) -> tuple[Operation, ...]:
    one: Said = {200: {JSON: given.scaling}}
    path = "/v1/scaling/{model}"
    return (
        operation(
            "/v1/scaling",
            "get",
            "scaling",
            "Number of replicas of all models.",
            {200: {JSON: given.scalings}},
            codes=(Code.CONFLICT,),
        ),
        operation(
            path,
            "get",
            "scalingOfModel",
            "Number of replicas of a model, and why, with the latest decisions.",
            one,
            codes=(Code.NOT_FOUND, Code.CONFLICT),
        ),
        operation(
            path,
            "put",
            "setScaling",
            "Fix a model's number of replicas, or override its bounds; what is left out follows the cluster file.",
            one,
            body=(bodies.SCALE, "Scaling"),
            codes=(*BODY, Code.NOT_FOUND, Code.CONFLICT),
        ),
    )


def _nodes(given: Answers) -> tuple[Operation, ...]:
    one: Said = {200: {JSON: given.node}}
    return (
        operation(
            "/v1/nodes",
            "get",
            "nodes",
            "Nodes and their GPUs: their health, what runs on them, and why nothing may.",
            {200: {JSON: given.nodes}},
            codes=(Code.CONFLICT,),
        ),
        operation(
            "/v1/nodes/{node}/drain",
            "post",
            "drain",
            "Take a node out of service: its replicas move, one per model at a time.",
            one,
            body=(bodies.DRAIN, "Drain"),
            codes=(*BODY, Code.NOT_FOUND, Code.CONFLICT),
        ),
        operation(
            "/v1/nodes/{node}/undrain",
            "post",
            "undrain",
            "Put a node, or a GPU that was taken out of service, back into service.",
            one,
            body=(bodies.UNDRAIN, "Undrain"),
            codes=(*BODY, Code.NOT_FOUND, Code.CONFLICT),
        ),
    )


def _keys(given: Answers) -> tuple[Operation, ...]:
    several: Said = {200: {JSON: given.keys}}
    made: Said = {200: {JSON: given.new_key}}
    return (
        operation(
            "/v1/keys",
            "get",
            "keys",
            "API keys with their holder, creation and expiry.",
            several,
            codes=_KEYS,
        ),
        operation(
            "/v1/keys",
            "post",
            "createKey",
            "Create a key of a `tenant`, or of the admin API for a `name` with a `role`. It is returned only once.",
            made,
            body=(bodies.CREATE_KEY, "Key"),
            codes=(*BODY, *_KEYS),
        ),
        operation(
            "/v1/keys/{key}/revoke",
            "post",
            "revokeKey",
            "Revoke a key for good: gateways refuse it within a second, the admin API at once.",
            {200: {JSON: given.key}},
            body=(bodies.COMMAND, "Why"),
            codes=(*BODY, *_KEYS),
        ),
        operation(
            "/v1/keys/{key}/rotate",
            "post",
            "rotateKey",
            "Create a key with the holder and lifetime of an old one, which is revoked after `overlap_s`.",
            made,
            body=(bodies.ROTATE_KEY, "Rotation"),
            codes=(*BODY, *_KEYS),
        ),
    )


def _records(given: Answers) -> tuple[Operation, ...]:
    busy = (Code.CONFLICT, Code.OVERLOADED, Code.DRAINING, Code.INTERNAL)
    return (
        operation(
            "/v1/decisions",
            "get",
            "decisions",
            "How a request was routed: every candidate with its score, the attempts, the outcome.",
            {200: {JSON: given.decisions}},
            query=(_REQUEST_ID,),
            codes=(Code.INVALID_REQUEST, *busy),
        ),
        operation(
            "/v1/usage",
            "get",
            "usage",
            "Requests and tokens by day, tenant, model and outcome, of all gateways together.",
            {200: {JSON: given.usage}},
            query=(_OF_TENANT, _OF_MODEL, _SINCE),
            codes=(Code.INVALID_REQUEST, *busy),
        ),
        operation(
            "/v1/audit/tail",
            "post",
            "auditTail",
            f"The last lines of the audit log, at most {bodies.EVENTS_MAX}; they may contain prompts.",
            {200: {JSON: given.audit_tail}},
            body=(bodies.AUDIT_TAIL, "AuditTailAsked"),
            codes=(*BODY, *busy),
        ),
        operation(
            "/v1/audit/verify",
            "post",
            "verifyAudit",
            "Verify the audit log: finds changed and removed lines and files.",
            {200: {JSON: given.audit_verified}},
            body=(bodies.AUDIT_VERIFY, "AuditVerify"),
            codes=(*BODY, *busy),
        ),
    )
