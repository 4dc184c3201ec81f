"""The datasets of this deployment, one folder or document each; see README.md for how to declare another."""
