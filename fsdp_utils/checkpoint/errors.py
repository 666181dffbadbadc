"""The one exception of this package."""


class CheckpointError(RuntimeError):
    """What was to be saved or loaded is not what is there: says where, what was expected and what was found.

    It has the same text on every rank. After a failed load the model and the optimizer are as they were,
    unless the text says otherwise.
    """
