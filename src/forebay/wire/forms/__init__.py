"""HTML form bodies (multipart/form-data), fields and files in one body, sans-IO; files as base64 text."""
