"""Bodies that HTML forms have: fields and files in one body, sans-IO."""
