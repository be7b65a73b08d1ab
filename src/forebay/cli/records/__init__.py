"""`forebay explain`, `usage` and `audit`: what gateways have recorded about finished requests."""
