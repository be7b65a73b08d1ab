"""`FOREBAY_COMPILE=1 pip wheel .` compiles the request path with mypyc; otherwise this adds nothing.

Everything else about the package is in pyproject.toml. The compiled modules are the same source: what is a value for
msgspec or pydantic, or a frozen dataclass, stays interpreted.
"""

import os
import sys
from glob import glob

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext

COMPILED = (
    "core/admission/*.py",
    "core/prefix/*.py",
    "core/resilience/*.py",
    "core/routing/*.py",
    "core/serving/batcher.py",
    "core/serving/ensemble/flow.py",
    "core/serving/queues.py",
    "core/serving/statistics.py",
    "core/serving/values.py",
    "core/tenancy/quota.py",
    "engines/tensor/arrays.py",
    "engines/tensor/batch.py",
    "gateway/account.py",
    "gateway/asking.py",
    "gateway/dispatch/dispatching.py",
    "gateway/fleet.py",
    "gateway/gateway.py",
    "gateway/link.py",
    "gateway/pages.py",
    "gateway/records/accesslog.py",
    "gateway/records/audit.py",
    "gateway/records/facts.py",
    "gateway/records/ledger.py",
    "gateway/records/recorder.py",
    "gateway/records/entries.py",
    "gateway/records/estimates.py",
    "gateway/records/writer.py",
    "gateway/requests/relay.py",
    "gateway/requests/state.py",
    "gateway/rollout/arms.py",
    "gateway/scheduling/choosing.py",
    "gateway/scheduling/hedging.py",
    "gateway/scheduling/learning.py",
    "gateway/scheduling/retrying.py",
    "gateway/scheduling/scheduler.py",
    "gateway/tenancy.py",
    "gateway/tensor/answers.py",
    "modelserver/http/answering.py",
    "modelserver/http/front.py",
    "modelserver/http/inferring.py",
    "modelserver/models/life/collection.py",
    "modelserver/models/life/model.py",
    "modelserver/models/life/version.py",
    "modelserver/models/running/call.py",
    "modelserver/models/running/counting.py",
    "modelserver/models/running/ensemble.py",
    "modelserver/models/running/execution.py",
    "modelserver/models/running/inputs.py",
    "modelserver/models/running/batch_scheduler.py",
    "modelserver/models/running/rate_limiting.py",
    "modelserver/process/encoding.py",
    "modelserver/process/channel.py",
    "modelserver/process/child/arrays.py",
    "modelserver/process/child/instance.py",
    "modelserver/process/child/outgoing.py",
    "modelserver/process/child/steps.py",
    "modelserver/process/lane.py",
    "modelserver/process/link.py",
    "modelserver/process/process.py",
    "modelserver/process/values.py",
    "modelserver/rpc/calls.py",
    "modelserver/rpc/health.py",
    "modelserver/rpc/inferring.py",
    "modelserver/rpc/reflection.py",
    "modelserver/rpc/requests.py",
    "modelserver/rpc/responses.py",
    "modelserver/rpc/streaming.py",
    "modelserver/rpc/walking.py",
    "modelserver/server.py",
    "modelserver/telemetry/latencies.py",
    "modelserver/telemetry/watch.py",
    "net/client/call.py",
    "net/client/pool.py",
    "net/client/upstream.py",
    "net/connection.py",
    "net/exchange.py",
    "net/outbox.py",
    "net/owner.py",
    "net/reading/arriving.py",
    "net/reading/reader.py",
    "net/replica_protocol.py",
    "obs/clock.py",
    "obs/metrics.py",
    "wire/apis/request_fields.py",
    "wire/http1.py",
    "wire/http2/*.py",
    "wire/oip/fields.py",
    "wire/oip/infer_answer.py",
    "wire/oip/infer_request.py",
    "wire/oip/route.py",
    "wire/records/chain.py",
    "wire/records/frames.py",
    "wire/transcript.py",
)


class Quietly(build_ext):
    """Without gcc's warnings: they are about generated C, and to look for them takes it minutes."""

    def build_extensions(self) -> None:
        """Compile."""
        self.compiler.compiler_so = [word for word in self.compiler.compiler_so if word != "-Wall"]
        super().build_extensions()


def extensions() -> list[Extension]:
    """What is to be compiled. Nothing when pip only asks for metadata: the C would be generated twice."""
    if os.environ.get("FOREBAY_COMPILE") != "1" or "dist_info" in sys.argv:
        return []
    from mypyc.build import mypycify

    paths = sorted(path for pattern in COMPILED for path in glob(f"src/forebay/{pattern}"))
    return mypycify(paths, opt_level="3", debug_level="0", group_name="forebay")


setup(ext_modules=extensions(), cmdclass={"build_ext": Quietly})
