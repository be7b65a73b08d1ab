"""Requests that models send to other models (Triton's business logic scripting).

Such a call is a request like any other: it waits in the callee's queue and is counted there. The calling instance
stays busy meanwhile, so models that call each other in a cycle, with no free instance left, wait until the caller's
batch counts as hung (`hang_s`) and its process is replaced. Pending calls of a process are cancelled when it ends,
for whatever reason: else they would run on and hang the next one too.
"""

import traceback

from forebay.core.serving.ensemble import LATEST
from forebay.core.serving.errors import Kind, Refused
from forebay.core.serving.values import InferRequest, InferResponse, Parameter
from forebay.engines.tensor.protocol import Act
from forebay.modelserver.models.context import ServerContext
from forebay.modelserver.process.values import Answer, Call


def nested(context: ServerContext, call: Call) -> None:
    """Run a model's call to another model, or to load or unload one; responses and errors go back to the caller."""
    if call.act is not Act.INFER:
        context.tasks.create_task(_administer(context, call))
        return
    work = call.work
    request = InferRequest(
        model=call.model,
        version="" if call.version == LATEST else str(call.version),
        id=work.id,
        inputs=tuple(work.inputs),
        outputs=work.wanted,
        parameters=dict(work.parameters),
        priority=work.priority,
        timeout_us=work.timeout_us,
        sequence_id=work.correlation_id,
        sequence_start=work.start,
        sequence_end=work.end,
    )

    def respond(response: InferResponse | None, final: bool) -> None:
        answer = None
        if response is not None:
            answer = Answer(response.outputs, response.parameters, response.error)
        call.respond(answer, final)

    try:
        call.on_gone = context.models.infer(request, respond).cancel
    except Refused as refused:
        text = refused.text
        if text.startswith("Request for unknown model"):
            text = f"Failed for execute the inference request. Model '{call.model}' is not ready."
        text = f"Model {call.model} - Error when running inference: {text}"  # all of it Triton's wording
        call.respond(Answer(error=Refused(refused.kind, text)), True)


async def _administer(context: ServerContext, call: Call) -> None:
    """Load or unload a model on behalf of another one, or report whether it is ready."""
    models = context.models
    name, parameters = call.model, call.work.parameters
    state: dict[str, Parameter] = {}
    try:
        if call.act is Act.LOAD:
            files = {tensor.name: bytes(tensor.data) for tensor in call.work.inputs}
            config = {"config": str(parameters["config"])} if "config" in parameters else {}
            await models.load(name, {**config, **files})
        elif call.act is Act.UNLOAD:
            await models.unload(name, bool(parameters.get("unload_dependents")))
        else:
            state[Act.READY] = models.lookup(name, call.version) is not None
    except Refused as refused:
        answer = Answer(error=refused)
    except Exception:  # supervisor: a bug costs one call, not the server
        context.log.error("call of a model failed", model=name, trace=traceback.format_exc())
        answer = Answer(error=Refused(Kind.INTERNAL, "internal error"))
    else:
        answer = Answer(parameters=state)
    call.respond(answer, True)
