"""Models with a task: their tensors are checked at load, not by the first request."""

from pathlib import Path

import pytest
from tests.modelserver.repository.models import described, problems

from forebay.modelserver.repository import Rules

STRICT = Rules(auto_complete=False)
TASK = "backend: 'python' max_batch_size: 4 parameters { key: 'forebay.task' value { string_value: 'embed' } } "
TEXT = "input { name: 'TEXT' data_type: TYPE_STRING dims: 1 } "
EMBEDDING = "output { name: 'EMBEDDING' data_type: TYPE_FP32 dims: 3 } "


def test_model_meeting_its_task_contract_is_accepted(tmp_path: Path) -> None:
    more = "output { name: 'TOKENS' data_type: TYPE_INT64 dims: 1 } "
    more += "output { name: 'OTHER' data_type: TYPE_BOOL dims: 1 } "
    spare = "input { name: 'HINT' data_type: TYPE_FP32 dims: 1 optional: true } "
    assert described(tmp_path, TASK + TEXT + spare + EMBEDDING + more, rules=STRICT).config.outputs


@pytest.mark.parametrize(
    ("tensors", "problem"),
    [
        (
            TEXT + "output { name: 'VECTOR' data_type: TYPE_FP32 dims: 3 }",
            "output: the task 'embed' needs 'EMBEDDING' (TYPE_FP32); found 'VECTOR'",
        ),
        (
            TEXT + "output { name: 'EMBEDDING' data_type: TYPE_INT32 dims: 3 }",
            "output[0].data_type: found TYPE_INT32 for 'EMBEDDING'; allowed for the task 'embed': TYPE_FP32, "
            "TYPE_FP16, TYPE_FP64",
        ),
        (
            "input { name: 'TEXT' data_type: TYPE_INT32 dims: 1 } " + EMBEDDING,
            "input[0].data_type: found TYPE_INT32 for 'TEXT'; allowed for the task 'embed': TYPE_STRING",
        ),
        (
            TEXT + "input { name: 'HINT' data_type: TYPE_FP32 dims: 1 } " + EMBEDDING,
            "input[1].optional: 'HINT' must be optional: the task 'embed' sends only 'TEXT'",
        ),
    ],
)
def test_violated_task_contract_reports_field_and_allowed_values(tensors: str, problem: str, tmp_path: Path) -> None:
    assert problem in problems(tmp_path, TASK + tensors, rules=STRICT)
