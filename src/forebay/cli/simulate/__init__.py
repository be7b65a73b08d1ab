"""`forebay simulate`: what a cluster would have done with a trace."""
