"""The options of `forebay serve` that are about gRPC; with the names, units and defaults that tritonserver has."""

from dataclasses import dataclass
from typing import Annotated, Any, Final, Literal

import typer

Switch = Literal["true", "false"]
_GRPC: Final = "Model repository: gRPC"
NEVER_MS: Final = 2**31 - 1


def _of(*names: str, help: str, **more: Any) -> Any:
    return typer.Option(*names, help=help, rich_help_panel=_GRPC, **more)


def _file(help: str) -> Any:
    return _of(metavar="FILE", help=help, show_default=False)


@dataclass(frozen=True, slots=True)
class GrpcWish:
    """The options as given; each field is one of that name."""

    grpc_infer_response_compression_level: Annotated[
        Literal["none", "low", "medium", "high"], _of(help="Of answers: none, low is deflate, else gzip.")
    ] = "none"
    grpc_max_message_size: Annotated[int, _of(min=1, max=NEVER_MS, help="Largest message of a request, bytes.")] = (
        NEVER_MS
    )
    grpc_max_messages_size: Annotated[
        str, _of(metavar="SIZE", help="Bytes of messages that are being received at the same time.")
    ] = "2GiB"
    grpc_header_forward_pattern: Annotated[
        str | None,
        _of(metavar="REGEX", help="Request headers with such a name become parameters.", show_default=False),
    ] = None
    grpc_use_ssl: Annotated[Switch, _of(help="Whether gRPC is encrypted (TLS).")] = "false"
    grpc_use_ssl_mutual: Annotated[Switch, _of(help="Whether clients, too, need a certificate.")] = "false"
    grpc_server_cert: Annotated[str, _file("PEM: the server's certificate, then its chain.")] = ""
    grpc_server_key: Annotated[str, _file("PEM: the certificate's private key.")] = ""
    grpc_root_cert: Annotated[str, _file("PEM: the authorities that vouch for clients.")] = ""
    grpc_keepalive_time: Annotated[int, _of(min=1, help="A client that is silent for so long is pinged, ms.")] = (
        7_200_000
    )
    grpc_keepalive_timeout: Annotated[int, _of(min=1, help="It has so long to answer, ms.")] = 20_000
    grpc_keepalive_permit_without_calls: Annotated[Switch, _of(help="Pings without a call, both ways.")] = "false"
    grpc_http2_min_recv_ping_interval_without_data: Annotated[
        int, _of(min=0, help="Clients may ping so often while nothing is sent to them, ms.")
    ] = 300_000
    grpc_http2_max_ping_strikes: Annotated[
        int, _of(min=0, help="Pings too soon that are overlooked before the connection ends; 0: all.")
    ] = 2
    grpc_max_connection_age: Annotated[
        int, _of(min=0, help="Older connections end once their calls have, ms; 0: none does.")
    ] = 0
    grpc_max_connection_age_grace: Annotated[
        int, _of(min=0, help="So long those calls may take, ms; 0: as long as they want.")
    ] = 0
