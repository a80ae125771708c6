"""What the mechanisms are worth: experiments with a committed record."""
