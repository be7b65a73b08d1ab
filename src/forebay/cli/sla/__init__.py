"""`forebay sla`: expected and delivered availability."""
