"""`forebay up` while it runs: its output, and how several controllers of one cluster take turns."""
