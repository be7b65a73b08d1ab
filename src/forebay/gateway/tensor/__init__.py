"""Requests for models with `task: tensor`: the Open Inference Protocol under /v2, and task endpoints."""
