"""`FOREBAY_COMPILE=1 pip wheel .` compiles the request path with mypyc; otherwise this adds nothing.

Everything else about the package is in pyproject.toml. The compiled modules are the same source: what is a value for
msgspec or pydantic, or a frozen dataclass, stays interpreted.
"""

import os
from glob import glob

from setuptools import Extension, setup

COMPILED = (
    "core/admission/*.py",
    "core/resilience/*.py",
    "core/routing/*.py",
    "core/tenancy/quota.py",
    "gateway/account.py",
    "gateway/asking.py",
    "gateway/fleet.py",
    "gateway/gateway.py",
    "gateway/hedging.py",
    "gateway/records/audit.py",
    "gateway/records/facts.py",
    "gateway/records/ledger.py",
    "gateway/records/recorder.py",
    "gateway/records/writer.py",
    "gateway/records/told.py",
    "gateway/relay.py",
    "gateway/tensor/answers.py",
    "gateway/tenancy.py",
    "net/client.py",
    "net/connection.py",
    "net/exchange.py",
    "obs/metrics.py",
    "wire/apis/wanted.py",
    "wire/http1.py",
    "wire/records/chain.py",
    "wire/records/frames.py",
    "wire/transcript.py",
)


def extensions() -> list[Extension]:
    """What is to be compiled."""
    if os.environ.get("FOREBAY_COMPILE") != "1":
        return []
    from mypyc.build import mypycify

    paths = sorted(path for pattern in COMPILED for path in glob(f"src/forebay/{pattern}"))
    return mypycify(paths, opt_level="3", debug_level="0", group_name="forebay")


setup(ext_modules=extensions())
