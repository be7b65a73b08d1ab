"""The gRPC front of the model server: the Open Inference Protocol on grpc.aio.

The messages are those of Triton's client library (extra `triton`); nothing outside of this package sees them.
"""
