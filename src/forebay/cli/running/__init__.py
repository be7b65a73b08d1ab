"""`forebay up` while it runs: what it tells people, and how several controls of one cluster take turns."""
