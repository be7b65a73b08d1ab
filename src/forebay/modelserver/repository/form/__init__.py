"""The forms of a configuration: text, protobuf message, JSON document, and the values of `core.serving.config`."""
