"""The worker process: an HTTP server around one engine child process."""
