"""The card at the top of a lesson."""

from IPython.display import Markdown

from fsdp_utils.lessons import progress, your_turn  # noqa: F401 - your_turn makes %%turn known, for each card


def card(number: int, *, learn: str, needs: str, minutes: tuple[int, int, int], ranks: str = "") -> Markdown:
    """Show what a lesson teaches, needs and takes, and how many of its turns are solved; 0 counts all turns.

    The minutes are to run the lesson on two cores, to read it, and for the turns.
    """
    takes = "{} to run, {} to read, {} for the turns · {}".format(*minutes, progress.begin(number))
    fields = [learn, needs, ranks or "4 (2 or 3 work: set `FSDP_RANKS`)", takes]
    head = "| learn | needs | ranks | minutes |\n| :-- | :-- | :-- | :-- |"
    of_all = "" if number else f"\n\nAll lessons: {progress.progress().note} `make progress` shows which."
    return Markdown(f"{head}\n| {' | '.join(fields)} |{of_all}")
