"""`forebay conformance`: checks a server of the Open Inference Protocol v2 over HTTP and gRPC."""
