"""Representations of a configuration: text, protobuf message, JSON, and the values of `core.serving.config`."""
