"""The server's side of HTTP/2 (RFC 9113), as far as gRPC needs it, and gRPC's own words on top of it: sans-IO."""
