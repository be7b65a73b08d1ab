"""A folder for `sys.path`: modules that models import, for the processes that they start themselves."""
