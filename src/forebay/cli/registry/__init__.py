"""`forebay registry` and `forebay history`: registered models, approvals, and who did what when."""
