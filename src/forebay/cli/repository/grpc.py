"""The gRPC options of `forebay serve`; names, units and defaults are those of tritonserver."""

from dataclasses import dataclass
from typing import Annotated, Any, Final, Literal

from forebay.cli.options import Switch
from forebay.cli.repository.options import in_panel

_GRPC: Final = "Model repository: gRPC"
NEVER_MS: Final = 2**31 - 1


def _of(*names: str, help: str, **more: Any) -> Any:
    return in_panel(_GRPC, *names, help=help, **more)


def _file(help: str) -> Any:
    return _of(metavar="FILE", help=help, show_default=False)


@dataclass(frozen=True, slots=True)
class GrpcOptions:
    """The options as given; each field has the name of its option."""

    grpc_infer_response_compression_level: Annotated[
        Literal["none", "low", "medium", "high"],
        _of(help="Compression of responses: low uses deflate, medium and high use gzip."),
    ] = "none"
    grpc_max_message_size: Annotated[int, _of(min=1, max=NEVER_MS, help="Largest request message, bytes.")] = NEVER_MS
    grpc_max_messages_size: Annotated[
        str, _of(metavar="SIZE", help="Total size of messages being received at once, such as 2GiB.")
    ] = "2GiB"
    grpc_header_forward_pattern: Annotated[
        str | None,
        _of(
            metavar="REGEX",
            help="Forward request metadata whose names match, in any case, as request parameters.",
            show_default=False,
        ),
    ] = None
    grpc_use_ssl: Annotated[Switch, _of(help="Use TLS for gRPC.")] = "false"
    grpc_use_ssl_mutual: Annotated[Switch, _of(help="Require client certificates (mutual TLS).")] = "false"
    grpc_server_cert: Annotated[str, _file("PEM file with the server certificate and its chain.")] = ""
    grpc_server_key: Annotated[str, _file("PEM file with the server's private key.")] = ""
    grpc_root_cert: Annotated[str, _file("PEM file with the CA certificates that clients are verified against.")] = ""
    grpc_keepalive_time: Annotated[int, _of(min=1, help="Ping a client after this much silence, ms.")] = 7_200_000
    grpc_keepalive_timeout: Annotated[
        int, _of(min=1, help="Close the connection if a ping is not answered within this time, ms.")
    ] = 20_000
    grpc_keepalive_permit_without_calls: Annotated[
        Switch, _of(help="Allow keepalive pings in both directions while no call is open.")
    ] = "false"
    grpc_http2_min_recv_ping_interval_without_data: Annotated[
        int, _of(min=0, help="Shortest interval between a client's pings while no data is sent to it, ms.")
    ] = 300_000
    grpc_http2_max_ping_strikes: Annotated[
        int, _of(min=0, help="Early pings tolerated before the connection is closed; 0: no limit.")
    ] = 2
    grpc_max_connection_age: Annotated[
        int, _of(min=0, help="Close connections older than this once their calls end, ms; 0: never.")
    ] = 0
    grpc_max_connection_age_grace: Annotated[
        int, _of(min=0, help="How long calls on such a connection may still take, ms; 0: no limit.")
    ] = 0
