"""llama.cpp as an engine."""
