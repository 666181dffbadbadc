"""The errors of checkpoints: CheckpointError, and the two kinds that a program can react to."""


class CheckpointError(RuntimeError):
    """A checkpoint cannot be saved or loaded: says where, what was expected and what was found.

    It has the same text and the same class on every rank. After a failed load the model and the optimizer are
    as they were, unless the text says otherwise.

    Example::

        try:
            verify_checkpoint("run")
        except CheckpointError as error:
            print(error)  # .../rank-00000.safetensors: expected 12480 bytes, found 100 bytes
    """


class CheckpointNotFoundError(CheckpointError):
    """There is no checkpoint, or none of that step: the run may begin anew.

    Example::

        try:
            step = load_distributed("run", model, optimizer)["step"]
        except CheckpointNotFoundError:
            step = 0
    """


class CheckpointDamagedError(CheckpointError):
    """A file is missing, cut short or changed: it is not what was saved. An older checkpoint may be whole.

    Example::

        for step in reversed(checkpoints("run")):
            try:
                load_distributed("run", model, optimizer, step=step)
                break
            except CheckpointDamagedError as error:
                print(f"step {step} is damaged: {error}")
    """
