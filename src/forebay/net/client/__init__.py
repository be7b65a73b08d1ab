"""An HTTP/1.1 client for one upstream: pooled keep-alive connections, responses streamed as they arrive."""

from forebay.net.client.call import Call, CallError, Header, Sink
from forebay.net.client.pool import Pool

__all__ = ["Call", "CallError", "Header", "Pool", "Sink"]
