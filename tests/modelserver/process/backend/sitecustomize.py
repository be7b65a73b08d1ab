"""Adds the backend `rig` to children that have this folder on PYTHONPATH."""

from forebay.engines.tensor import BACKENDS

BACKENDS["rig"] = ("rig_backend", "RigBackend", "")
