"""The gRPC front of the model server: the Open Inference Protocol on `net.http2`.

The messages are those of Triton's client library (extra `triton`); they are not used outside this package.
"""
