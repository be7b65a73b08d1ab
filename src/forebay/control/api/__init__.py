"""The admin API: status, events, rollouts, the registry, and changes of the cluster file."""
