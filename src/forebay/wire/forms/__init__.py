"""HTML form bodies (multipart/form-data): fields and files in one body, sans-IO."""
