"""Messages, text and token ids."""
