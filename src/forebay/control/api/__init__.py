"""The admin API: what runs, what has happened, rollouts, the registry, and changes of the cluster file."""
