"""Requests that give way to more urgent ones: the rules of `core.admission` on attempts under way."""
