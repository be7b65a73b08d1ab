"""`forebay simulate`: replays a trace against a described cluster."""
