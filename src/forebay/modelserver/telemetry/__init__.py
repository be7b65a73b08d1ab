"""Telemetry of the model server: traces, logs, metrics, and the settings through which clients change them."""
