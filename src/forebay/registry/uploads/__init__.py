"""What clients send of artifacts that the cluster does not see itself, until a revision is made of it."""
