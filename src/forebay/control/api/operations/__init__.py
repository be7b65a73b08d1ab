"""What each operation of the admin API does; authorization and error handling are in `control.api.app`."""
