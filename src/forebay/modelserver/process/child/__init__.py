"""The child process: loads one model and runs its batches."""
