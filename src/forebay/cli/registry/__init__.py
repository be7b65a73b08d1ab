"""`forebay registry` and `forebay history`: registered models, their approval, and who did what when."""
