"""`forebay sla`: what can be promised, and what was delivered."""
