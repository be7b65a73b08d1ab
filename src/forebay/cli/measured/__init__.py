"""What `bench/` has measured, as tables for people."""
