"""How a new revision comes to serve: courses with steps, phases of a rollout, what each wants of the cluster."""
