"""Invalid scheduling configurations: all problems are reported together."""

from pathlib import Path

import pytest
from tests.modelserver.repository.models import problems

SCHEDULING = [
    (
        "dynamic_batching { preferred_batch_size: [0, 9] }",
        [
            "dynamic_batching.preferred_batch_size[0]: found 0; allowed: 1 or more",
            "dynamic_batching.preferred_batch_size[1]: found 9; allowed: at most max_batch_size (8)",
        ],
    ),
    (
        "dynamic_batching { priority_levels: 5000 default_priority_level: 1 }",
        [
            "dynamic_batching.priority_levels: found 5000; allowed: at most 1000",
        ],
    ),
    (
        (
            "dynamic_batching { priority_levels: 2 preserve_ordering: true priority_queue_policy { key:"
            " 3 value { timeout_action: DELAY default_timeout_microseconds: 1 } } }"
        ),
        [
            "dynamic_batching.default_priority_level: found 0; allowed: 1 to priority_levels (2)",
            "dynamic_batching.preserve_ordering: requires a single priority level; found 2",
            "dynamic_batching.priority_queue_policy[3]: found level 3; allowed: 1 to priority_levels (2)",
            "dynamic_batching.priority_queue_policy[3].timeout_action: DELAY cannot be combined with "
            "preserve_ordering",
        ],
    ),
    (
        "sequence_batching { oldest { preferred_batch_size: 9 max_candidate_sequences: -1 } }",
        [
            "sequence_batching.oldest.preferred_batch_size[0]: found 9; allowed: at most max_batch_size (8)",
            "sequence_batching.oldest.max_candidate_sequences: found -1; allowed: 0 or more",
        ],
    ),
    (
        "sequence_batching { direct { minimum_slot_utilization: 1.5 } }",
        [
            "sequence_batching.direct.minimum_slot_utilization: found 1.5; allowed: 0 to 1",
        ],
    ),
    (
        (
            "sequence_batching { control_input {} control_input { name: 'a' control {} } control_input "
            "{ name: 'a' control { kind: CONTROL_SEQUENCE_START int32_false_true: 1 } } control_input {"
            " name: 'b' control { kind: CONTROL_SEQUENCE_CORRID data_type: TYPE_FP32 bool_false_true: "
            "true } } control_input { name: 'c' control { kind: CONTROL_SEQUENCE_END int32_false_true: "
            "1 } } }"
        ),
        [
            "sequence_batching.control_input[0].name: found ''; allowed: a name, each tensor once",
            "sequence_batching.control_input[0].control: found 0; allowed: one for each tensor",
            (
                "sequence_batching.control_input[1].control[0]: found none; allowed: one of "
                "int32_false_true, fp32_false_true, bool_false_true"
            ),
            "sequence_batching.control_input[2].name: found 'a'; allowed: a name, each tensor once",
            "sequence_batching.control_input[2].control[0].kind: another tensor has CONTROL_SEQUENCE_START already",
            (
                "sequence_batching.control_input[2].control[0].int32_false_true: allowed: two values, "
                "the one for false and the one for true"
            ),
            (
                "sequence_batching.control_input[3].control[0].bool_false_true: cannot be combined with "
                "CONTROL_SEQUENCE_CORRID"
            ),
            (
                "sequence_batching.control_input[3].control[0].data_type: found TYPE_FP32; allowed: "
                "TYPE_INT32, TYPE_INT64, TYPE_STRING, TYPE_UINT32, TYPE_UINT64"
            ),
            (
                "sequence_batching.control_input[4].control[0].int32_false_true: allowed: two values, "
                "the one for false and the one for true"
            ),
        ],
    ),
    (
        (
            "sequence_batching { state { initial_state { data_type: TYPE_FP32 } initial_state {} } "
            "state { input_name: 'i' output_name: 'o' data_type: TYPE_INT8 dims: [-1, 2] initial_state "
            "{ name: 'n' data_type: TYPE_INT8 dims: [1, 3] data_file: '../x' } } state { input_name: "
            "'i' output_name: 'p' data_type: TYPE_INT8 dims: 2 initial_state { name: 'n' data_type: "
            "TYPE_INT8 dims: 2 data_file: 'absent' } } }"
        ),
        [
            "sequence_batching.state[0].input_name: found ''; allowed: a name, each once",
            "sequence_batching.state[0].output_name: found ''; allowed: a name, each once",
            "sequence_batching.state[0].data_type: must be given",
            "sequence_batching.state[0].dims: found []; allowed: 1 or more, or -1 for any size",
            "sequence_batching.state[0].initial_state: found 2; allowed: one",
            "sequence_batching.state[0].initial_state[0].name: must be given",
            (
                "sequence_batching.state[0].initial_state[0].data_type: found TYPE_FP32; allowed: that "
                "of the state, TYPE_INVALID"
            ),
            "sequence_batching.state[0].initial_state[0]: one of zero_data: true and data_file must be given",
            (
                "sequence_batching.state[1].initial_state[0].dims: found [1, 3]; allowed: sizes that "
                "fit the state's dims [-1, 2]"
            ),
            "sequence_batching.state[1].initial_state[0].data_file: '../x' leads out of the model's folder",
            "sequence_batching.state[2].input_name: found 'i'; allowed: a name, each once",
        ],
    ),
    (
        (
            "sequence_batching { state { input_name: 'i' output_name: 'p' data_type: TYPE_INT8 dims: 2 "
            "initial_state { name: 'n' data_type: TYPE_INT8 dims: 2 data_file: 'absent' } } }"
        ),
        [
            (
                "sequence_batching.state[0].initial_state[0].data_file: 'initial_state/absent' cannot "
                "be read: No such file or directory"
            ),
        ],
    ),
    (
        (
            "ensemble_scheduling {} instance_group {} model_warmup { batch_size: 1 inputs { key: 'a' "
            "value { data_type: TYPE_FP32 zero_data: true } } } optimization {}"
        ),
        [
            "ensemble_scheduling: needs platform: 'ensemble'; found ''",
            "instance_group: an ensemble has none of its own; its models may",
            "model_warmup: an ensemble has none of its own; its models may",
            "optimization: an ensemble has none of its own; its models may",
            "ensemble_scheduling.step: must be given",
        ],
    ),
    (
        (
            "platform: 'ensemble' ensemble_scheduling { step {} step { model_name: 'm' model_version: "
            "-2 model_namespace: 'x' input_map { key: 'a' } output_map { key: '' value: 'b' } } }"
        ),
        [
            "ensemble_scheduling.step[0].model_name: found ''; allowed: the name of another model",
            "ensemble_scheduling.step[0].input_map: must be given",
            "ensemble_scheduling.step[0].output_map: must be given",
            "ensemble_scheduling.step[1].model_name: found 'm'; allowed: the name of another model",
            "ensemble_scheduling.step[1].model_version: found -2; allowed: a version, or -1 for the latest",
            "ensemble_scheduling.step[1].model_namespace: there are no namespaces here: model names are unique",
            'ensemble_scheduling.step[1].input_map["a"]: both names must be given',
            'ensemble_scheduling.step[1].output_map[""]: both names must be given',
        ],
    ),
    (
        (
            "model_warmup { batch_size: 9 } model_warmup { batch_size: 1 inputs { key: 'a' value { "
            "dims: -1 } } inputs { key: 'b' value { data_type: TYPE_FP32 dims: 0 input_data_file: '/x' "
            "} } inputs { key: 'c' value { data_type: TYPE_FP32 zero_data: false } } }"
        ),
        [
            "model_warmup[0].batch_size: found 9; allowed: 0 (it is skipped) to max_batch_size (8)",
            "model_warmup[0].inputs: must be given",
            'model_warmup[1].inputs["a"].data_type: must be given',
            'model_warmup[1].inputs["a"].dims: found [-1]; allowed: sizes that are not open',
            (
                'model_warmup[1].inputs["a"]: one of zero_data: true, random_data: true and '
                "input_data_file must be given"
            ),
            'model_warmup[1].inputs["b"].dims: found 0; allowed: 1 or more, or -1 for any size',
            "model_warmup[1].inputs[\"b\"].input_data_file: '/x' leads out of the model's folder",
            (
                'model_warmup[1].inputs["c"]: one of zero_data: true, random_data: true and '
                "input_data_file must be given"
            ),
        ],
    ),
    (
        (
            "model_warmup { batch_size: 1 inputs { key: 'a' value { data_type: TYPE_FP32 dims: 2 "
            "input_data_file: 'x' } } }"
        ),
        [
            "model_warmup[0].inputs[\"a\"]: 'warmup/x' cannot be read: No such file or directory",
        ],
    ),
]


@pytest.mark.parametrize(("config", "expected"), SCHEDULING, ids=range(len(SCHEDULING)))
def test_all_scheduling_problems_are_reported_together(tmp_path: Path, config: str, expected: list[str]) -> None:
    assert problems(tmp_path, f"max_batch_size: 8 {config}") == expected
