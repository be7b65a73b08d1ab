"""Rollouts of new revisions: plans with steps, phases, and what each phase requires of the cluster."""
