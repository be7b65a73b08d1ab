"""The batch loop: an HTTP shell around one engine child process."""
