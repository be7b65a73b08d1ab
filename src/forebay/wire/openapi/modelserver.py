"""The HTTP API of a model server as an OpenAPI document."""

from typing import Any, Final

from forebay.core.errors import Code
from forebay.wire import openai_request
from forebay.wire.openapi import answers, inference, tasks
from forebay.wire.openapi.document import JSON, PATH, TEXT, Operation, make_document

_TASK_CODES: Final = (
    Code.INVALID_JSON,
    Code.UNSUPPORTED_ENCODING,
    Code.INVALID_REQUEST,
    Code.UNSUPPORTED_PARAMETER,
    Code.WRONG_TASK,
    Code.MODEL_NOT_FOUND,
    Code.OVERLOADED,
    Code.DEADLINE_EXCEEDED,
)


class TaskModel(answers.Closed):
    """A model that has a task."""

    id: str
    object: str
    created: int
    owned_by: str
    task: str


class TaskModelList(answers.Closed):
    """The models that have a task."""

    object: str
    data: list[TaskModel]


def operations() -> tuple[Operation, ...]:
    """All operations."""
    make = inference.Maker()
    error: dict[str, Any] = {"error": answers.Error}
    return (
        *inference.of_server(make),
        *inference.of_administration(make),
        *inference.of_models(make, make),
        Operation(
            "/v1/embeddings",
            "post",
            "embeddings",
            "Compute embeddings of texts.",
            {200: {JSON: answers.Embeddings}},
            body=openai_request.EMBEDDINGS_BODY,
            body_name="EmbeddingsRequest",
            codes=_TASK_CODES,
            **error,
        ),
        *(
            Operation(path, "post", id, text, {200: said}, bodies=bodies, codes=_TASK_CODES, **error)
            for path, (id, text, bodies, said) in tasks.TASKS.items()
        ),
        Operation("/v1/models", "get", "listModels", "Models with a task.", {200: {JSON: TaskModelList}}, **error),
        Operation(
            "/v1/models/{model}",
            "get",
            "showModel",
            "One model with a task.",
            {200: {JSON: TaskModel}},
            parameters=(inference.NAME,),
            codes=(Code.MODEL_NOT_FOUND,),
            **error,
        ),
        Operation("/metrics", "get", "metrics", "Metrics in Prometheus text format.", {200: {TEXT: None}}, **error),
        Operation(PATH, "get", "openapi", "This document.", {200: {JSON: dict}}, **error),
    )


def document(version: str) -> bytes:
    """The document as JSON."""
    text = "The Open Inference Protocol with Triton's extensions, and endpoints for models that declare their task."
    return make_document("Forebay model server", text, version, operations())
