"""Queues requests, sends them to replicas, retries them: the rules of `core.admission` and `core.routing` applied."""
