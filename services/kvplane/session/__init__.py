"""The session registry: conversations, their turns, and how to find them again."""
