"""Tasks with exact graders, their prompts, and the small reference checkpoint."""
