"""Studies of what is learned and in which order: latents of a hierarchy, and distinct tokens before common ones."""
