"""The suite's own checks, on its own models; the expected results were recorded from Triton."""

from forebay.cli.conformance.cases import (
    control,
    ensembles,
    forms,
    generate,
    memory,
    observing,
    refused,
    refused_rpc,
    scheduling,
    sequences,
    streams,
)
from forebay.cli.conformance.check import Check

MODULES = (
    forms, refused, refused_rpc, generate, streams, ensembles, sequences, scheduling, memory, observing, control,
)  # fmt: skip


def all_checks() -> list[Check]:
    """All checks, grouped by the models that they need."""
    checks = [check for module in MODULES for check in module.checks()]
    names = [check.name for check in checks]
    assert len(names) == len(set(names)), "two checks have one name"
    return sorted(checks, key=lambda check: (check.models, check.name))
