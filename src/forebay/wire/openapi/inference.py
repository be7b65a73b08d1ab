"""The operations of the Open Inference Protocol, with Triton's extensions."""

from collections.abc import Mapping
from typing import Any, Final

from forebay.core.errors import Code
from forebay.wire.openapi import inference_answers as of
from forebay.wire.openapi.answers import ServerSentEvent
from forebay.wire.openapi.document import EVENTS, JSON, Header, Operation, Parameter

BINARY: Final = "application/octet-stream"
"""JSON followed by the bytes of tensors; the header says how many bytes are JSON."""
MODEL: Final = "/v2/models/{model}"
VERSION: Final = MODEL + "/versions/{version}"
NAME: Final = Parameter("model", "path", "The name of a model.", {"type": "string", "minLength": 1})
_NUMBER: Final = Parameter("version", "path", "A version of it.", {"type": "string", "pattern": "^[0-9]{1,19}$"})
_REGION: Final = Parameter("region", "path", "The name of the region.", {"type": "string", "minLength": 1})
_PLACES: Final = {"{model}": NAME, "{version}": _NUMBER, "{region}": _REGION}
JSON_LENGTH: Final = Header(
    "inference-header-content-length",
    "How many bytes of the body are JSON.",
    {"type": "string", "pattern": "^[0-9]+$"},
)
_WRONG: Final = (400, 404, 500, 501, 503, 504)
"""Error statuses of a model server, besides those of every server."""
_INFERRED: Final = {JSON: of.InferAnswer, BINARY: None}
_INFER: Final = {JSON: of.InferRequest, BINARY: None}

Answers = Mapping[str, type | None]


class Maker:
    """Builds the operations of one kind of server. `more`: what all of its operations have in addition."""

    def __init__(self, *, codes: tuple[Code, ...] = (), statuses: tuple[int, ...] = _WRONG, **more: Any) -> None:
        self._codes = codes
        self._statuses = statuses
        self._more = more

    def get(self, path: str, id: str, text: str, kind: type | None, *, other: int = 0) -> Operation:
        """A read-only operation; `other`: another status with the same response."""
        return self._made(path, "get", id, text, {JSON: kind}, other=other)

    def post(self, path: str, id: str, text: str, body: type | None, answer: Answers) -> Operation:
        """An operation without a required body."""
        return self._made(path, "post", id, text, answer, bodies={} if body is None else {JSON: body}, needed=False)

    def work(self, path: str, id: str, text: str, bodies: Answers, answer: Answers) -> Operation:
        """An inference operation."""
        headers = (JSON_LENGTH,) if BINARY in bodies else ()
        return self._made(path, "post", id, text, answer, bodies=bodies, headers=headers)

    def _made(
        self,
        path: str,
        method: str,
        id: str,
        text: str,
        answer: Answers,
        *,
        bodies: Answers | None = None,
        needed: bool = True,
        headers: tuple[Header, ...] = (),
        other: int = 0,
    ) -> Operation:
        said: dict[int, Answers] = {200: answer}
        wrong: Answers = {JSON: of.InferenceError}
        if EVENTS in answer:  # the first response determines the status
            wrong = {**wrong, **answer}
        said |= dict.fromkeys(self._statuses, wrong)
        if other:
            said[other] = answer
        return Operation(
            path,
            method,
            id,
            text,
            said,
            of.InferenceError,
            parameters=tuple(part for place, part in _PLACES.items() if place in path),
            headers=(*self._more.get("headers", ()), *headers),
            codes=self._codes,
            bodies=bodies or {},
            body_needed=needed,
            **{name: value for name, value in self._more.items() if name != "headers"},
        )


def of_models(make: Maker, work: Maker) -> tuple[Operation, ...]:
    """The operations of one model, with and without its version. `work` builds those that run inference."""
    found: list[Operation] = []
    for path, of_what in ((MODEL, ""), (VERSION, "Version")):
        found += (
            make.get(path, f"metadata{of_what}", "The model's inputs and outputs.", of.ModelMetadata),
            make.get(f"{path}/ready", f"modelReady{of_what}", "Whether the model is ready.", of.Ready),
            make.get(f"{path}/config", f"config{of_what}", "Its configuration.", of.ModelConfiguration),
            make.get(f"{path}/stats", f"statistics{of_what}", "Its inference statistics.", of.Statistics),
            work.work(f"{path}/infer", f"infer{of_what}", "Run an inference.", _INFER, _INFERRED),
            work.work(
                f"{path}/generate",
                f"generate{of_what}",
                "Run an inference with plain JSON: inputs by name.",
                {JSON: of.Generate},
                {JSON: of.Generated},
            ),
            work.work(
                f"{path}/generate_stream",
                f"generateStream{of_what}",
                "Run an inference, with each response as an event.",
                {JSON: of.Generate},
                {EVENTS: ServerSentEvent},
            ),
        )
    return tuple(found)


def of_server(make: Maker) -> tuple[Operation, ...]:
    """The operations of any server."""
    return (
        make.get("/v2", "server", "What the server is.", of.ServerMetadata),
        make.post(
            "/v2/repository/index",
            "repositoryIndex",
            "The models in the repository.",
            of.IndexWish,
            {JSON: list[of.IndexEntry]},
        ),
    )


def of_administration(make: Maker) -> tuple[Operation, ...]:
    """Operations of a standalone model server: administration, and state of the server."""
    empty: Answers = {}
    found = [
        make.get("/v2/health/live", "inferenceLive", "Whether the server runs.", of.Live),
        make.get("/v2/health/ready", "inferenceReady", "Whether all models are ready.", of.Ready, other=400),
        make.get("/v2/models/stats", "allStatistics", "Inference statistics of all models.", of.Statistics),
        make.post("/v2/repository/models/{model}/load", "load", "Load or reload a model.", of.Load, empty),
        make.post("/v2/repository/models/{model}/unload", "unload", "Unload a model.", of.Unload, empty),
        make.get("/v2/logging", "logging", "The log settings.", of.LogSettings),
        make.post("/v2/logging", "changeLogging", "Change the log settings.", of.LogSettings, {JSON: of.LogSettings}),
    ]
    for path, whose in (("/v2/trace/setting", ""), (MODEL + "/trace/setting", "OfModel")):
        kind = of.TraceSettings
        found += (
            make.get(path, f"tracing{whose}", "The trace settings.", kind),
            make.post(path, f"changeTracing{whose}", "Change the trace settings.", kind, {JSON: kind}),
        )
    for name, region in (("system", of.SystemRegion), ("cuda", of.CudaRegion)):
        base = f"/v2/{name}sharedmemory"
        for path, whose in ((base, "All"), (base + "/region/{region}", "")):
            found += (
                make.get(f"{path}/status", f"{name}Regions{whose}", "Registered regions.", list[of.Region]),
                make.post(f"{path}/unregister", f"{name}Unregister{whose}", "Unregister regions.", None, empty),
            )
        path = base + "/region/{region}/register"
        found.append(make.work(path, f"{name}Register", "Register shared memory of a client.", {JSON: region}, empty))
    return tuple(found)
