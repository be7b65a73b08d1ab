"""`forebay conformance`: what a server of the Open Inference Protocol v2 does, checked over HTTP and gRPC."""
