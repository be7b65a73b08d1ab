"""`forebay sla`: availability that can be promised, and what was delivered."""
