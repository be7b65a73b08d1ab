"""`forebay keys`: makes, lists, revokes and replaces API keys, here or through an admin API."""
