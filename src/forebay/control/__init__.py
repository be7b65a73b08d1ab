"""The reconcile loop: observe, decide, act; and the admin API."""
