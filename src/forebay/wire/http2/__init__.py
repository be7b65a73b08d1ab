"""The server side of HTTP/2 (RFC 9113), as far as gRPC needs it, and gRPC on top of it: sans-IO."""
