"""What only the lessons need: the card, checks of exercises, small tasks, figures, the meter, recordings.

No other room imports this one.
"""
