"""The Open Inference Protocol with Triton's extensions, in its HTTP form: bytes to values and back, sans-IO."""
