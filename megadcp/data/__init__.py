"""From raw text to the documents of a step."""
