"""What only the lessons need: ranks, small tasks, figures, exercises."""
