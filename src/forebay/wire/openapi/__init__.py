"""OpenAPI documents of our HTTP APIs, generated from the tables that requests are parsed with."""
