"""Speech tasks: transcription, and text to speech."""
