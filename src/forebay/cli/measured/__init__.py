"""What `bench/` has measured, as tables for the README."""
