"""Benchmark results of `bench/` as tables for the docs."""
