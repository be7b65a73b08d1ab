"""`forebay explain`, `usage` and `audit`: what the gateways have written down of finished requests."""
