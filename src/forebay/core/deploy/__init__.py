"""How a new revision is rolled out: courses with steps, phases, and what each phase requires of the cluster."""
