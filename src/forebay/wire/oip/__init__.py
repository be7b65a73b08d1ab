"""The Open Inference Protocol with Triton's extensions, in its HTTP form: parsing and serialisation, sans-IO."""
