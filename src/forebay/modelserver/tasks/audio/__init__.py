"""Tasks of speech: text out of audio, and audio out of text."""
