"""Environment and scheduling policy of a child process."""

import os
import subprocess
import sys

import pytest

from forebay.modelserver.process import placement
from forebay.modelserver.process.placement import Placement


def test_placement_overrides_the_inherited_environment() -> None:
    placed = Placement(environment=(("THREADS", "1"),), gpus=("1", "3"))

    assert placement.environment(placed, {"THREADS": "8", "CUDA_VISIBLE_DEVICES": "0", "HOME": "/"}) == {
        **placement.DEFAULTS,
        "THREADS": "1",
        "CUDA_VISIBLE_DEVICES": "1,3",
        "HOME": "/",
    }
    for name in placement.DEFAULTS:
        assert placement.environment(Placement(), {name: "mine"})[name] == "mine"


ASK = """
import os, subprocess, sys
from forebay.modelserver.process.placement import take_turns
if len(sys.argv) > 1:
    os.sched_setscheduler(0, int(sys.argv[1]), os.sched_param(0))
take_turns()
child = "import os; print(os.sched_getscheduler(0))"
print(os.sched_getscheduler(0), flush=True)
subprocess.run([sys.executable, "-c", child], check=True)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="other systems have no such policies")
def test_server_and_children_use_sched_batch_unless_configured() -> None:
    for given, policies in (((), [os.SCHED_BATCH] * 2), ((str(os.SCHED_IDLE),), [os.SCHED_IDLE] * 2)):
        told = subprocess.run([sys.executable, "-c", ASK, *given], check=True, capture_output=True, text=True)
        assert list(map(int, told.stdout.split())) == policies
