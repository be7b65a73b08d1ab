"""What `forebay up` and `forebay status` show of a cluster."""
