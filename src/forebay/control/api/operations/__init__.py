"""The operations of the admin API; authorisation and error handling are in `control.api.app`."""
