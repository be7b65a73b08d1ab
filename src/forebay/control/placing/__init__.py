"""Where the replicas of a plan run: nodes as the cluster file and the machine describe them, and what fits there."""
