"""The control plane: the reconcile loop (observe, decide, act) and the admin API."""
