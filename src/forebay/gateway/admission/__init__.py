"""Preemption: the rules of `core.admission` applied to attempts in flight."""
