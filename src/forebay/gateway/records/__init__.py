"""What a gateway records about finished requests: decisions, the audit log, the usage ledger."""
