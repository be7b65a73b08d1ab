"""ONNX files: what they refer to, and what of them need not be computed."""
