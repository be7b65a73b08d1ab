"""Requests for models of the task `tensor`: the Open Inference Protocol under /v2, and the endpoints of tasks."""
