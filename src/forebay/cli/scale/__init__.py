"""`forebay scale`: numbers of replicas, the reasons for them, and manual overrides."""
