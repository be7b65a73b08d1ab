"""How `forebay up` and `forebay status` show a cluster."""
