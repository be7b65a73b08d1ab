"""Where Forebay deviates from the recorded Triton on purpose. docs/triton.md says it to users."""

from collections.abc import Iterable
from dataclasses import replace
from typing import Final

from forebay.cli.conformance.check import Level, Result, Verdict

NAME: Final = "forebay"
"""What Forebay calls itself in its metadata."""
WORDS: Final = "texts of errors and their like are the same only where a client could act on them"

TELLS_MORE: Final = "the index keeps why a configuration could not be read; Triton only logs it"
REFUSES: Final = "what can only be a mistake is refused; Triton takes it"
CHECKED: Final = "outputs are what the configuration promises; Triton passes on whatever a model gives"
STATUS_FIRST: Final = "errors have the status of an error; Triton sends 200, or 400 for the model's own error"

DIFFERENCES: Final[dict[str, str]] = {
    "control/life": "a model that is not there is not found (404), not merely not ready (400)",
    "http/model unknown ready": "a model that is not there is not found (404), not merely not ready (400)",
    "http/model version 9 ready": "a model that is not there is not found (404), not merely not ready (400)",
    "control/load bad_backend": TELLS_MORE,
    "control/load bad_cycle": TELLS_MORE,
    "control/load bad_dims": TELLS_MORE,
    "control/load bad_field": TELLS_MORE,
    "control/load bad_missing": TELLS_MORE,
    "control/load bad_name": TELLS_MORE,
    "control/load bad_syntax": TELLS_MORE,
    "control/load bad_version": TELLS_MORE,
    "control/config input twice": REFUSES,
    "control/config output twice": REFUSES,
    "control/unknown": REFUSES,
    "grpc/infer output twice": REFUSES,
    "infer/json/output twice": REFUSES,
    "settings/trace rate negative": REFUSES,
    "types/INT8 beyond": REFUSES,
    "types/INT16 beyond": REFUSES,
    "types/INT32 beyond": REFUSES,
    "sequences/direct of text id": "a text is no number: Triton gives the model the text's first 8 bytes as one",
    "sequences/oldest of text id": "a text is no number: Triton gives the model the text's first 8 bytes as one",
    "failures/wrong-datatype": CHECKED,
    "failures/wrong-shape": CHECKED,
    "statistics/failures": "a request that was answered with an error has failed; Triton counts it as a success",
    "scheduling/warm-up": "warm-up is not load: Triton counts it as inferences",
    "generate/error": STATUS_FIRST,
    "generate/stream, error": STATUS_FIRST,
    "generate/no words": STATUS_FIRST,
    "generate/two words": STATUS_FIRST,
    "generate/word, then error": STATUS_FIRST,
    "generate/stream, input missing": "a request without a required input never reaches the model",
    "http/infer percent-encoded": "names in URLs are percent-decoded",
    "forms/compressed as gzip, deflate": "clients send this by default without meaning it",
}
"""Names of checks whose result is a deviation of the level MUST, and why it stays."""


def without_known(results: Iterable[Result]) -> list[Result]:
    """Results of Forebay itself, where a deviation that is on purpose says so instead."""
    return [_known(result) for result in results]


def _known(result: Result) -> Result:
    if result.verdict is not Verdict.DEVIATES:
        return result
    why = WORDS if result.level is Level.SHOULD else DIFFERENCES.get(result.name)
    return result if why is None else replace(result, verdict=Verdict.KNOWN, note=why)
