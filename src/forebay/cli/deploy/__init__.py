"""`forebay deploy`, `rollout` and `apply`: change a running cluster through its admin API."""
