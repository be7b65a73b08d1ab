"""What is published of our HTTP APIs, as OpenAPI documents: made from the tables that requests are read by."""
