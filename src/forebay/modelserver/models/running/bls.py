"""Models that call other models.

Such a call is a request like any other: it waits in the queue of the model that is called and counts there. The
calling instance stays busy meanwhile, so models that wait for each other in a circle, with no instance left for the
calls, wait until the batch that asked counts as a hang (`hang_s`): its process is then replaced. What a process has
asked for is withdrawn when it ends, however that comes about: else it would run on in the next one, and hang it too.
"""

from forebay.core.serving.errors import Refused
from forebay.core.serving.values import InferRequest, InferResponse, Parameter
from forebay.engines.tensor.protocol import Act
from forebay.modelserver.models.site import Others, Site
from forebay.modelserver.process.values import Answer
from forebay.modelserver.process.values import Call as Asked

LATEST = -1


def nested(site: Site, asked: Asked) -> None:
    """Send on what a model asks; its answers, or why there is none, go back to it."""
    if asked.act is not Act.INFER:
        site.tasks.create_task(_administer(site.others, asked))
        return
    work = asked.work
    request = InferRequest(
        model=asked.model,
        version="" if asked.version == LATEST else str(asked.version),
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
        asked.respond(answer, final)

    try:
        asked.on_gone = site.others.infer(request, respond).cancel
    except Refused as refused:
        text = refused.text
        if text.startswith("Request for unknown model"):
            text = f"Failed for execute the inference request. Model '{asked.model}' is not ready."
        text = f"Model {asked.model} - Error when running inference: {text}"  # Triton's words, all of it
        asked.respond(Answer(error=Refused(refused.kind, text)), True)


async def _administer(others: Others, asked: Asked) -> None:
    """Load or unload a model for another one, or say whether it serves."""
    name, parameters = asked.model, asked.work.parameters
    said: dict[str, Parameter] = {}
    try:
        if asked.act is Act.LOAD:
            files = {tensor.name: bytes(tensor.data) for tensor in asked.work.inputs}
            config = {"config": str(parameters["config"])} if "config" in parameters else {}
            await others.load(name, {**config, **files})
        elif asked.act is Act.UNLOAD:
            await others.unload(name, bool(parameters.get("unload_dependents")))
        else:
            said[Act.READY] = others.lookup(name, asked.version) is not None
    except Refused as refused:
        answer = Answer(error=refused)
    else:
        answer = Answer(parameters=said)
    asked.respond(answer, True)
