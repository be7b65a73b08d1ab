"""Which beginnings of prompts are held where."""
