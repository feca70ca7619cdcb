"""The one kind of error that is the user's to mend."""


class UserError(ValueError):
    """Something the user gave cannot be used. The message is one line: the value, and what would work instead.

    The command line prints it without a traceback and exits with 2.
    """
