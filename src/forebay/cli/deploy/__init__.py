"""`forebay deploy`, `rollout` and `apply`: changes of a running cluster, through its admin API."""
