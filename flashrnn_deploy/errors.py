"""The one exception that means "the input, not the program, has to change"."""


class FlashRNNError(Exception):
    """A mistake the user can fix: the message says what is wrong, with which values, and what to do.

    The command line prints it as one line and exits with status 1. Every other exception is a bug and keeps its
    traceback.
    """
