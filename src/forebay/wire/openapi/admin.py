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
        "description": "A key of `forebay keys create --admin ROLE`, with `admin.auth: keys`.",
    }
}
_PRINTABLE: Final[Shape] = {"type": "string", "pattern": "^[ -~]*$", "maxLength": 2 * bodies.NAME_CHARS_MAX}
_NUMBER: Final[Shape] = {"type": "string", "pattern": "^[0-9]{1,18}$"}
_LAST: Final = Parameter(
    "last", "query", "So many, the newest.", {"type": "integer", "minimum": 1, "maximum": bodies.EVENTS_MAX}
)
_AFTER: Final = Parameter("after", "query", "Only events with a higher number.", _NUMBER)
_SUBJECT: Final = Parameter(
    "subject",
    "query",
    "Only of this, such as `model/chat`, and of what lies below it.",
    _PRINTABLE,
)
_OF_MODEL: Final = Parameter("model", "query", "Only of this model.", _PRINTABLE)
_PERIOD: Final = Parameter(
    "period_s",
    "query",
    "The period up to now, seconds; without it 30 days.",
    {"type": "integer", "minimum": 1, "maximum": bodies.PERIOD_S_MAX},
)
_REQUEST_ID: Final = Parameter(
    "request_id", "query", "The `x-request-id` of its answer.", {**_PRINTABLE, "minLength": 1}, required=True
)
_OF_TENANT: Final = Parameter("tenant", "query", "Only of this tenant.", _PRINTABLE)
_SINCE: Final = Parameter(
    "since", "query", "The first day (UTC) that counts, such as `2026-01-31`.", {"type": "string", "format": "date"}
)
_ENDED: Final = Parameter(
    "ended",
    "query",
    "Whether they have ended. Without it: what is under way, and the last one of each model.",
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
        "What control knows of its cluster, and what it can be told. With `admin.auth: keys` every request but those "
        "for health and this document carries a key; each operation says which role it needs."
    )
    return make_document("Forebay admin", text, version, operations(given), SECURITY)


def _looks(given: Answers) -> tuple[Operation, ...]:
    text: Said = {200: {TEXT: None}}
    return (
        operation("/livez", "get", "livez", "Whether control runs.", text),
        operation("/readyz", "get", "readyz", "Whether the cluster serves every model.", {**text, 503: {TEXT: None}}),
        operation("/metrics", "get", "metrics", "Control's metrics, in Prometheus' text format.", text),
        operation(
            "/v1/status", "get", "status", "The cluster: models, replicas, gateways.", {200: {JSON: given.status}}
        ),
        operation(
            "/v1/events",
            "get",
            "events",
            "What control has seen and done since it was started, the oldest first.",
            {200: {JSON: given.events}},
            query=(_AFTER,),
            codes=(Code.INVALID_REQUEST,),
        ),
        operation(
            "/v1/history",
            "get",
            "history",
            "Who changed what, when and why, the oldest first: the newest ones, or the first ones after a number.",
            {200: {JSON: given.history}},
            query=(_SUBJECT, _LAST, _AFTER),
            codes=(Code.INVALID_REQUEST, *STORE),
        ),
        operation(
            "/v1/sla",
            "get",
            "sla",
            "What can be promised of the models as they are set up, and what a period has delivered.",
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
            "Read the cluster file again and take it over; if it has problems, nothing is changed.",
            said,
            codes=(Code.INVALID_REQUEST,),
        ),
        operation(
            "/v1/apply",
            "post",
            "apply",
            "Take over a cluster file that comes with the request, or, with `dry_run`, say what it would change.",
            said,
            body=(bodies.APPLY, "Apply"),
            codes=BODY,
        ),
    )


def _rollouts(given: Answers) -> tuple[Operation, ...]:
    one: Said = {200: {JSON: given.rollout}}
    commands = {
        "pause": "Keep the share of a rollout as it is; what harms still ends it.",
        "resume": "Let a rollout go on.",
        "promote": "Let a rollout take its next step without a verdict.",
        "abort": "End a rollout: the old revision serves everything at once.",
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
            "Rollouts, the newest last.",
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
            "How many replicas models have.",
            {200: {JSON: given.scalings}},
            codes=(Code.CONFLICT,),
        ),
        operation(
            path,
            "get",
            "scalingOfModel",
            "How many replicas a model has, and why, with the last decisions.",
            one,
            codes=(Code.NOT_FOUND, Code.CONFLICT),
        ),
        operation(
            path,
            "put",
            "setScaling",
            "Set how many replicas a model has, or its bounds; what is not said is as the cluster file has it.",
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
            "Nodes and their GPUs: how they are, what runs there, and why nothing may.",
            {200: {JSON: given.nodes}},
            codes=(Code.CONFLICT,),
        ),
        operation(
            "/v1/nodes/{node}/drain",
            "post",
            "drain",
            "Take a node out of service: what runs there moves away, one replica of a model at a time.",
            one,
            body=(bodies.DRAIN, "Drain"),
            codes=(*BODY, Code.NOT_FOUND, Code.CONFLICT),
        ),
        operation(
            "/v1/nodes/{node}/undrain",
            "post",
            "undrain",
            "Let a node serve again, or a GPU that was taken out of service.",
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
            "API keys: whose, since when, until when.",
            several,
            codes=_KEYS,
        ),
        operation(
            "/v1/keys",
            "post",
            "createKey",
            "Make a key: of a `tenant`, or of the admin API for a `name` with a `role`. It is shown this once.",
            made,
            body=(bodies.CREATE_KEY, "Key"),
            codes=(*BODY, *_KEYS),
        ),
        operation(
            "/v1/keys/{key}/revoke",
            "post",
            "revokeKey",
            "End a key for good: gateways refuse it within a second, the admin API at once.",
            {200: {JSON: given.key}},
            body=(bodies.COMMAND, "Why"),
            codes=(*BODY, *_KEYS),
        ),
        operation(
            "/v1/keys/{key}/rotate",
            "post",
            "rotateKey",
            "Make a key for the same holder, good for as long as the old one was, which ends after `overlap_s`.",
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
            f"The newest lines of the audit log, at most {bodies.EVENTS_MAX}; they may hold prompts.",
            {200: {JSON: given.audit_tail}},
            body=(bodies.AUDIT_TAIL, "AuditTailAsked"),
            codes=(*BODY, *busy),
        ),
        operation(
            "/v1/audit/verify",
            "post",
            "verifyAudit",
            "Check the audit log: finds changed and removed lines and files.",
            {200: {JSON: given.audit_verified}},
            body=(bodies.AUDIT_VERIFY, "AuditVerify"),
            codes=(*BODY, *busy),
        ),
    )
