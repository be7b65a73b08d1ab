"""Intentional deviations of Forebay from the recorded Triton, also documented in docs/triton.md."""

from collections.abc import Iterable
from dataclasses import replace
from typing import Final

from forebay.cli.conformance.check import Level, Result, Verdict

NAME: Final = "forebay"
"""Forebay's server name in its metadata."""
WORDS: Final = "the wording of errors is the same only where a client could act on it"

TELLS_MORE: Final = "the index shows why a configuration is invalid; Triton only logs it"
REFUSES: Final = "input that can only be a mistake is rejected; Triton accepts it"
CHECKED: Final = "outputs are checked against the configuration; Triton passes on whatever a model returns"
STATUS_FIRST: Final = "errors have the status of an error; Triton sends 200, or 400 for the model's own error"

DIFFERENCES: Final[dict[str, str]] = {
    "control/life": "an unknown model is not found (404), not just not ready (400)",
    "http/model unknown ready": "an unknown model is not found (404), not just not ready (400)",
    "http/model version 9 ready": "an unknown model is not found (404), not just not ready (400)",
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
    "sequences/direct of text id": "text ids are not numbers: Triton passes its first 8 bytes as a number",
    "sequences/oldest of text id": "text ids are not numbers: Triton passes its first 8 bytes as a number",
    "failures/wrong-datatype": CHECKED,
    "failures/wrong-shape": CHECKED,
    "statistics/failures": "a request with an error response counts as failed; Triton counts it as a success",
    "scheduling/warm-up": "warm-up does not count as inferences; in Triton it does",
    "generate/error": STATUS_FIRST,
    "generate/stream, error": STATUS_FIRST,
    "generate/no words": STATUS_FIRST,
    "generate/two words": STATUS_FIRST,
    "generate/word, then error": STATUS_FIRST,
    "generate/stream, input missing": "a request without a required input never reaches the model",
    "http/infer percent-encoded": "names in URLs are percent-decoded",
    "forms/compressed as gzip, deflate": "clients send this by default without wanting compression",
}
"""Checks with an intentional deviation of the level MUST, and its reason."""


def without_known(results: Iterable[Result]) -> list[Result]:
    """The results of Forebay itself, with intentional deviations marked as known."""
    return [_known(result) for result in results]


def _known(result: Result) -> Result:
    if result.verdict is not Verdict.DEVIATES:
        return result
    why = WORDS if result.level is Level.SHOULD else DIFFERENCES.get(result.name)
    return result if why is None else replace(result, verdict=Verdict.KNOWN, note=why)
