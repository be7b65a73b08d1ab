"""The gRPC options, and how a command receives them."""

import math
from dataclasses import fields, replace
from pathlib import Path
from typing import Annotated

import pytest
import trustme
import typer
from typer.testing import CliRunner

from forebay.cli.options import with_fields
from forebay.cli.repository.grpc import GrpcOptions
from forebay.cli.repository.plan import rpc_options
from forebay.cli.settings import UserError
from forebay.net.http2 import Keepalive


def test_grpc_options_default_to_grpc_defaults() -> None:
    options = rpc_options(GrpcOptions())
    assert (options.keepalive, options.tls, options.forwarded_headers) == (Keepalive(), None, None)
    assert (options.compression, options.message_bytes_max) == ("none", 2**31 - 1)
    assert options.messages_bytes_max == 2**31
    with pytest.raises(UserError, match="--grpc-max-messages-size"):
        rpc_options(GrpcOptions(grpc_max_messages_size="much"))


def test_keepalive_options_are_converted_to_seconds() -> None:
    keepalive = rpc_options(
        GrpcOptions(
            grpc_keepalive_time=1500, grpc_keepalive_timeout=250, grpc_keepalive_permit_without_calls="true",
            grpc_http2_min_recv_ping_interval_without_data=0, grpc_http2_max_ping_strikes=0,
            grpc_max_connection_age=60_000,
        )
    ).keepalive  # fmt: skip
    assert keepalive == Keepalive(1.5, 0.25, True, 0.0, 0, 60.0, math.inf)


def test_tls_options_require_readable_files(tmp_path: Path) -> None:
    authority = trustme.CA()
    server = authority.issue_cert("localhost")
    files = {name: str(tmp_path / name) for name in ("cert", "key", "root")}
    server.cert_chain_pems[0].write_to_path(files["cert"])
    server.private_key_pem.write_to_path(files["key"])
    authority.cert_pem.write_to_path(files["root"])
    wish = GrpcOptions(grpc_use_ssl="true", grpc_server_cert=files["cert"], grpc_server_key=files["key"])
    assert rpc_options(wish).tls is not None
    assert rpc_options(replace(wish, grpc_use_ssl_mutual="true", grpc_root_cert=files["root"])).tls is not None
    for change, text in (
        ({"grpc_server_cert": ""}, '--grpc-server-cert: found "", which cannot be read'),
        ({"grpc_server_key": files["root"]}, "--grpc-server-key: found"),
        ({"grpc_use_ssl_mutual": "true"}, '--grpc-root-cert: found "", which cannot be read'),
    ):
        with pytest.raises(UserError) as error:
            rpc_options(replace(wish, **change))  # type: ignore[arg-type]
        assert text in str(error.value)
    with pytest.raises(UserError, match="--grpc-header-forward-pattern"):
        rpc_options(GrpcOptions(grpc_header_forward_pattern="("))


def test_command_receives_grpc_options_as_one_value() -> None:
    got: list[tuple[str, GrpcOptions]] = []

    @with_fields(grpc=GrpcOptions)
    def command(word: Annotated[str, typer.Argument()] = "none", *, grpc: GrpcOptions) -> None:
        got.append((word, grpc))

    app = typer.Typer()
    app.command()(command)
    words = ["hello", "--grpc-use-ssl", "true", "--grpc-max-connection-age", "5"]
    assert CliRunner().invoke(app, words).exit_code == 0
    assert got == [("hello", GrpcOptions(grpc_use_ssl="true", grpc_max_connection_age=5))]
    shown = CliRunner().invoke(app, ["--help"], env={"COLUMNS": "300"}).stdout
    assert all("--" + each.name.replace("_", "-") in shown for each in fields(GrpcOptions))
