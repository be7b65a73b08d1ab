"""Children that find this folder on PYTHONPATH have one more backend, `rig`."""

from forebay.engines.tensor import BACKENDS

BACKENDS["rig"] = ("rig_backend", "RigBackend", "")
