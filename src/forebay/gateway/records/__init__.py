"""What a gateway writes down of finished requests: decisions, the audit log, the usage ledger."""
