"""The models behind the fronts: life cycle, scheduling, placement and statistics."""
