"""What went by in a queue: its log, a text file that the transitions append to and that decides nothing."""
