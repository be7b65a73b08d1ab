"""What is set for a child before it starts."""

from forebay.modelserver.process import placement
from forebay.modelserver.process.placement import Placement


def test_a_child_inherits_what_the_server_was_started_with_and_its_placement_goes_before() -> None:
    placed = Placement(environment=(("THREADS", "1"),), gpus=("1", "3"))

    assert placement.environment(placed, {"THREADS": "8", "CUDA_VISIBLE_DEVICES": "0", "HOME": "/"}) == {
        **placement.DEFAULTS,
        "THREADS": "1",
        "CUDA_VISIBLE_DEVICES": "1,3",
        "HOME": "/",
    }
    for name in placement.DEFAULTS:
        assert placement.environment(Placement(), {name: "mine"})[name] == "mine"
