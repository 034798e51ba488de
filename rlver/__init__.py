"""Conversations with a simulated user: the user, its prompts, SAGE's scores, and toy users."""
