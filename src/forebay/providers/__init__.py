"""The provider protocol and its adapters: starting and stopping processes."""
