"""CheckpointError, which everything in this package raises."""


class CheckpointError(RuntimeError):
    """A checkpoint cannot be saved or loaded: says where, what was expected and what was found.

    It has the same text on every rank. After a failed load the model and the optimizer are as they were,
    unless the text says otherwise.

    Example::

        try:
            verify_checkpoint("run")
        except CheckpointError as error:
            print(error)  # run/.../__0_0.distcp: expected ... bytes, found 100
    """
