"""Vision models of the demo, and the generation of files that no package has."""
