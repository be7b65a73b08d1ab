"""`forebay scale`: how many replicas models have, why, and what people say to that."""
