"""Vision models of the demo, and how the files are made that no package has."""
