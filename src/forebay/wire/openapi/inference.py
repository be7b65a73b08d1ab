"""The Open Inference Protocol, with Triton's extensions, as operations of documents."""

from collections.abc import Mapping
from typing import Any, Final

from forebay.core.errors import Code
from forebay.wire.openapi import inference_answers as of
from forebay.wire.openapi.answers import ServerSentEvent
from forebay.wire.openapi.document import EVENTS, JSON, Header, Operation, Parameter

BINARY: Final = "application/octet-stream"
"""JSON, and behind it the bytes of tensors; the header says how many bytes are JSON."""
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
_WRONG: Final = (400, 404, 500, 501, 503)
"""Statuses of errors of a model server, beside those of every listener."""
_INFERRED: Final = {JSON: of.InferAnswer, BINARY: None}
_INFER: Final = {JSON: of.InferRequest, BINARY: None}

Answers = Mapping[str, type | None]


class Maker:
    """Makes operations of one kind of server. `more`: what all of its operations have besides."""

    def __init__(self, *, codes: tuple[Code, ...] = (), statuses: tuple[int, ...] = _WRONG, **more: Any) -> None:
        self._codes = codes
        self._statuses = statuses
        self._more = more

    def get(self, path: str, id: str, text: str, kind: type | None, *, other: int = 0) -> Operation:
        """What is only read; `other`: another status with that answer."""
        return self._made(path, "get", id, text, {JSON: kind}, other=other)

    def post(self, path: str, id: str, text: str, body: type | None, answer: Answers) -> Operation:
        """What needs no body."""
        return self._made(path, "post", id, text, answer, bodies={} if body is None else {JSON: body}, needed=False)

    def work(self, path: str, id: str, text: str, bodies: Answers, answer: Answers) -> Operation:
        """What models do."""
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
        if EVENTS in answer:  # the first response decides about the status
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
    """What is asked of one model, with and without its version. `work` makes the operations that models run for."""
    found: list[Operation] = []
    for path, of_what in ((MODEL, ""), (VERSION, "Version")):
        found += (
            make.get(path, f"metadata{of_what}", "What the model takes and gives.", of.ModelMetadata),
            make.get(f"{path}/ready", f"modelReady{of_what}", "Whether the model is ready.", of.Ready),
            make.get(f"{path}/config", f"config{of_what}", "Its configuration.", of.ModelConfiguration),
            make.get(f"{path}/stats", f"statistics{of_what}", "What it has done.", of.Statistics),
            work.work(f"{path}/infer", f"infer{of_what}", "Have it compute outputs of inputs.", _INFER, _INFERRED),
            work.work(
                f"{path}/generate",
                f"generate{of_what}",
                "The same with plain JSON: inputs by name.",
                {JSON: of.Generate},
                {JSON: of.Generated},
            ),
            work.work(
                f"{path}/generate_stream",
                f"generateStream{of_what}",
                "The same, each response as an event.",
                {JSON: of.Generate},
                {EVENTS: ServerSentEvent},
            ),
        )
    return tuple(found)


def of_server(make: Maker) -> tuple[Operation, ...]:
    """What is asked of any server."""
    return (
        make.get("/v2", "server", "What the server is.", of.ServerMetadata),
        make.post(
            "/v2/repository/index",
            "repositoryIndex",
            "The models that there are.",
            of.IndexWish,
            {JSON: list[of.IndexEntry]},
        ),
    )


def of_administration(make: Maker) -> tuple[Operation, ...]:
    """What changes a model server, or is about one alone."""
    empty: Answers = {}
    found = [
        make.get("/v2/health/live", "inferenceLive", "Whether the server runs.", of.Live),
        make.get("/v2/health/ready", "inferenceReady", "Whether all models are ready.", of.Ready, other=400),
        make.get("/v2/models/stats", "allStatistics", "What all models have done.", of.Statistics),
        make.post("/v2/repository/models/{model}/load", "load", "Load or reload a model.", of.Load, empty),
        make.post("/v2/repository/models/{model}/unload", "unload", "Unload a model.", of.Unload, empty),
        make.get("/v2/logging", "logging", "What is logged.", of.LogSettings),
        make.post("/v2/logging", "changeLogging", "Change what is logged.", of.LogSettings, {JSON: of.LogSettings}),
    ]
    for path, whose in (("/v2/trace/setting", ""), (MODEL + "/trace/setting", "OfModel")):
        kind = of.TraceSettings
        found += (
            make.get(path, f"tracing{whose}", "How requests are traced.", kind),
            make.post(path, f"changeTracing{whose}", "Change how requests are traced.", kind, {JSON: kind}),
        )
    for name, region in (("system", of.SystemRegion), ("cuda", of.CudaRegion)):
        base = f"/v2/{name}sharedmemory"
        for path, whose in ((base, "All"), (base + "/region/{region}", "")):
            found += (
                make.get(f"{path}/status", f"{name}Regions{whose}", "Registered regions.", list[of.Region]),
                make.post(f"{path}/unregister", f"{name}Unregister{whose}", "Forget regions.", None, empty),
            )
        path = base + "/region/{region}/register"
        found.append(make.work(path, f"{name}Register", "Use shared memory of a client.", {JSON: region}, empty))
    return tuple(found)
