"""Records of finished requests: decisions, the audit log, the usage ledger."""
